"""Sign-in with a token or the one-time link, and sign-out."""

from __future__ import annotations

import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from etfarm.client.errors import EtfarmError
from etfarm.client.web.access import ENTER, HEALTH, SIGN_IN
from etfarm.client.web.forms import form
from etfarm.client.web.templating import STATUSES, render, templates_of
from etfarm.client.web.visitors import Visitor, Visitors, visitor_of

MAX_TOKEN_CHARACTERS: Final = 4_096
COOKIE_BYTES: Final = 32
COOKIE_CHARACTERS: Final = 43


async def sign_in(request: Request) -> Response:
    """Show the form, or sign in with the token that it has sent."""
    if request.method == "GET" and request.scope["state"]["visitor"] is not None:
        return RedirectResponse(templates_of(request).url_for("devices"), status_code=303)
    if request.method == "GET":
        return _show(request, "sign_in.html", next=_local_path(request, request.query_params.get("next", "")))
    fields = form(request)
    next_path = _local_path(request, fields.get("next", ""))
    try:
        visitor = await _visitors(request).sign_in(
            fields.get("token", "")[:MAX_TOKEN_CHARACTERS], request.scope["state"]["owner"]
        )
    except EtfarmError as error:
        return _show(request, "sign_in.html", error=error, next=next_path)
    return _welcome(request, visitor, next_path)


async def enter(request: Request) -> Response:
    """Show the button of the one-time link, or sign in with its code. A form, since programs that preview links open them."""
    if request.method == "GET":
        return _show(request, "enter.html", code=request.query_params.get("code", ""))
    try:
        visitor = await _visitors(request).enter(form(request).get("code", ""), request.scope["state"]["owner"])
    except EtfarmError as error:
        return _show(request, "sign_in.html", error=error)
    return _welcome(request, visitor, "")


async def sign_out(request: Request) -> Response:
    """End the visitor's session."""
    visitors = _visitors(request)
    request.app.state.uploads.remove_of(visitor_of(request).cookie)
    await visitors.sign_out(visitor_of(request))
    answer = RedirectResponse(templates_of(request).url_for("sign_in"), status_code=303)
    answer.delete_cookie(visitors.cookie_name, path=f"{request.app.state.options.root_path}/")
    return answer


async def health(request: Request) -> Response:
    """Answer that the page's server runs, for a reverse proxy or a service manager."""
    return PlainTextResponse("ok\n")


def _visitors(request: Request) -> Visitors:
    visitors = request.app.state.visitors
    assert isinstance(visitors, Visitors)
    return visitors


def _show(request: Request, template: str, *, error: EtfarmError | None = None, next: str = "", code: str = "") -> Response:
    """Return a form for a visitor who has not signed in, with a token that belongs to a cookie for forms."""
    visitors = _visitors(request)
    # Another tab may show the form with the same cookie.
    cookie = request.cookies.get(visitors.cookie_name, "")
    if len(cookie) != COOKIE_CHARACTERS:
        cookie = secrets.token_urlsafe(COOKIE_BYTES)
    status = STATUSES[error.kind] if error is not None else 200
    token = visitors.csrf.create(cookie)
    wait_s = error.metadata.get("retry_after_s", "") if error is not None else ""
    page = render(
        request, template, title="Sign in", status=status, error=error, form_token=token, next=next, code=code, wait_s=wait_s
    )
    if wait_s:
        page.headers["retry-after"] = wait_s
    visitors.set_cookie(page, cookie)
    return page


def _welcome(request: Request, visitor: Visitor, next_path: str) -> Response:
    answer = RedirectResponse(next_path or templates_of(request).url_for("devices"), status_code=303)
    _visitors(request).set_cookie(answer, visitor.cookie)
    return answer


def _local_path(request: Request, path: str) -> str:
    """Return a path of this page; empty for anything else, such as another site's address."""
    root = request.app.state.options.root_path
    is_local = path.startswith(f"{root}/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_local else ""


ROUTES = (
    Route(SIGN_IN, sign_in, name="sign_in", methods=["GET", "POST"]),
    Route(ENTER, enter, name="enter", methods=["GET", "POST"]),
    Route("/sign-out", sign_out, name="sign_out", methods=["POST"]),
    Route(HEALTH, health, name="health", methods=["GET"]),
)
