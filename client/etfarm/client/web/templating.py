"""Pages from templates: `render` fills one with a page's values and those that every page has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from etfarm.client.errors import EtfarmError, Kind
from etfarm.client.formats import phases, units
from etfarm.client.jobs import summary
from etfarm.client.web.device_facts import readings
from etfarm.client.web.device_rows import count_states
from etfarm.client.web.options import WebOptions
from etfarm.client.web.visitors import Visitors
from etfarm.wire.comparison.numbers import ratio_text
from etfarm.wire.escapes import printable
from etfarm.wire.sqnr import decibels

HERE: Final = Path(__file__).parent
REPORT_FOLDER: Final = HERE.parent / "formats" / "html"
"""The HTML report's templates, styles, scripts and vendored libraries, which the page shares."""
STATIC_FOLDERS: Final = (HERE / "static", REPORT_FOLDER)

NAVIGATION: Final = (
    ("devices", "Devices"), ("reservations", "Reservations"), ("queue", "Queue"), ("jobs", "Jobs"), ("compare", "Compare"),
    ("history", "History"), ("recipes", "Recipes"), ("artifacts", "Artifacts"), ("server", "Server"),
)  # fmt: skip
"""Routes of the navigation by name, with their titles; those without a page are left out."""

STATUSES: Final[Mapping[Kind, int]] = {
    Kind.INVALID_ARGUMENT: 400, Kind.NOT_FOUND: 404, Kind.ALREADY_EXISTS: 409, Kind.PERMISSION_DENIED: 403,
    Kind.UNAUTHENTICATED: 401, Kind.FAILED_PRECONDITION: 409, Kind.RESOURCE_EXHAUSTED: 429, Kind.OUT_OF_RANGE: 400,
    Kind.DATA_LOSS: 502, Kind.DEADLINE_EXCEEDED: 504, Kind.ABORTED: 409, Kind.UNAVAILABLE: 503, Kind.UNIMPLEMENTED: 501,
    Kind.CANCELLED: 409, Kind.INTERNAL: 500,
}  # fmt: skip
"""The HTTP status of an error."""


class Templates:
    """The environment of all templates."""

    def __init__(self, app: Starlette, options: WebOptions, version: str) -> None:
        """Prepare for the routes of `app`, and static files of a version."""
        self._app = app
        self._root_path = options.root_path
        self._version = version
        self._environment = Environment(
            loader=FileSystemLoader([HERE / "templates", REPORT_FOLDER / "templates"]),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.globals.update(
            units=units,
            url_for=self.url_for,
            static=self.static,
            has_route=self.has_route,
            device_readings=readings,
            count_states=count_states,
            summary=summary,
            phases=phases,
            style_attribute="data-style",
            decibels=decibels,
            ratio_text=ratio_text,
        )
        self._environment.filters.update(
            size=units.size, time=units.time, percent=units.percent, milliseconds=units.milliseconds,
            ago=lambda then: units.ago(then, datetime.now(UTC)), instant=_instant, iso=_iso, coded=_coded,
            breakable=_breakable, significant=units.significant, code=_code, until=_until, clock=_clock,
        )  # fmt: skip

    def url_for(self, name: str, /, query: Mapping[str, object] | None = None, **path: object) -> str:
        """Return the address of a route: a path that begins with the page's root path, with a query."""
        quoted = {key: quote(str(value), safe="") for key, value in path.items()}
        url = f"{self._root_path}{self._app.url_path_for(name, **quoted)}"
        return f"{url}?{urlencode(dict(query), doseq=True)}" if query else url

    def static(self, name: str) -> str:
        """Return the address of a static file, which changes with the files."""
        return f"{self._root_path}/static/{self._version}/{name}"

    def fragment(self, name: str, **values: object) -> str:
        """Return a part of a page. Untrusted text cannot control the browser: markup is escaped, control characters replaced."""
        return printable(self._environment.get_template(name).render(**values))

    def has_route(self, name: str) -> bool:
        """Return whether there is a page of this name."""
        return any(isinstance(route, Route) and route.name == name for route in self._app.routes)


def templates_of(request: Request) -> Templates:
    """Return the application's templates."""
    templates = request.app.state.templates
    assert isinstance(templates, Templates)
    return templates


def render(request: Request, name: str, *, command: str = "", title: str = "", status: int = 200, **values: object) -> Response:
    """Return a page.

    Args:
        name: a template, which usually extends base.html; in a fragment, that is all.
        command: the `etfarm` command that shows or does the same; empty for pages without one.
        title: the page's title.
    """
    templates = templates_of(request)
    visitors: Visitors = request.app.state.visitors
    visitor = request.scope.get("state", {}).get("visitor")
    text = templates.fragment(
        name,
        command=command,
        title=title,
        visitor=visitor,
        navigation=[(route, label) for route, label in NAVIGATION if templates.has_route(route)],
        path=request.url.path,
        csrf_token=visitors.csrf.create(visitor.cookie) if visitor is not None else "",
        **values,
    )
    return HTMLResponse(text, status_code=status)


def render_error(request: Request, error: EtfarmError, status: int | None = None) -> Response:
    """Return the page of an error, with its reason, sentence and remedy; for htmx, a fragment."""
    template = "_error.html" if request.headers.get("hx-request") else "error.html"
    return render(request, template, title="Error", status=status or STATUSES[error.kind], error=error)


def _instant(time: datetime | None) -> str:
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _until(time: datetime) -> str:
    return f"in {units.clock(max(0.0, (time - datetime.now(UTC)).total_seconds()))}"


def _clock(time: datetime) -> str:
    """Return an instant of these days without its seconds; today, without the date."""
    is_today = time.astimezone(UTC).date() == datetime.now(UTC).date()
    return f"{time.astimezone(UTC):{'%H:%M' if is_today else '%Y-%m-%d %H:%M'}} UTC"


def _iso(time: datetime | None) -> str:
    return "" if time is None else time.isoformat()


def _coded(text: object) -> Markup:
    """Return a sentence with its commands, which are in backticks, as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _breakable(text: object) -> Markup:
    """Return a path or a name, which may break after a slash, a dot or an underscore, but not within a word."""
    return Markup("<wbr>").join(re.split(r"(?<=[^\s/._][/._])(?=[^\s/._\d])", str(text)))


def _code(enumerated: object) -> str:
    """Return a constant's name in words: `GATE_FAILED` as `gate failed`."""
    return str(getattr(enumerated, "value", enumerated)).replace("_", " ").lower()
