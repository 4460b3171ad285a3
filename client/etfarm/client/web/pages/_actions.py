"""What all actions share: a page that asks, the change itself, and the way back to what was changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from etfarm.client.errors import EtfarmError
from etfarm.client.web.form_fields import Field, command_line
from etfarm.client.web.forms import Fields, form
from etfarm.client.web.templating import STATUSES, render


@dataclass(frozen=True)
class Action:
    """Something that a visitor can do, as the page that asks for it shows it."""

    title: str
    about: str
    """What happens, in a sentence or two."""
    button: str
    command: Sequence[str]
    """The command that does the same, without the options of `fields`."""
    back: str
    """Where Cancel leads."""
    fields: tuple[Field, ...] = ()
    is_dangerous: bool = False
    """Whether something is lost."""


async def perform(
    request: Request, action: Action, change: Callable[[Fields], Awaitable[Any]], then: Callable[[Any], str] | None = None
) -> Response:
    """Ask, or change something and go on to where Cancel leads, or to the address that `then` returns for what was changed.

    What the farm refuses is shown above the form, which keeps its values. Whether the visitor may do it, the farm decides.
    """
    if request.method != "POST":
        return _ask(request, action)
    fields = form(request)
    try:
        changed = await change(fields)
    except EtfarmError as error:
        return _ask(request, replace(action, fields=tuple(_filled(field, fields) for field in action.fields)), error)
    return RedirectResponse(action.back if then is None else then(changed), status_code=303)


def _ask(request: Request, action: Action, error: EtfarmError | None = None) -> Response:
    status = STATUSES[error.kind] if error is not None else 200
    command = command_line(action.command, action.fields)
    return render(
        request, "action.html", title=action.title, command=command, status=status, action=action, error=error,
        base_command=command_line(action.command),
    )  # fmt: skip


def _filled(field: Field, fields: Fields) -> Field:
    """Return a field with what the visitor has sent."""
    if field.kind == "checkbox":
        return replace(field, is_checked=field.value in fields.getlist(field.name))
    return replace(field, value=str(fields.get(field.name, "")).strip())
