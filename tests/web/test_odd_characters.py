"""Characters that headers, paths or messages cannot have, in every field of every page: a sentence answers, never a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

import pytest
from starlette.routing import Route

from etfarm.client.web import pages
from tests.support.web import Visit, WebFarm, csrf_of, running_page

pytestmark = pytest.mark.slow(reason="starts a server, an agent and the page")

ODD: Final = (
    "é", "etf_\x00", "a\r\nX-Odd: 1", "\t", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u202e", "\U0001d518", "../../etc/passwd",
    "\ufffd", "a" * 400, "%", "%s%n", "'\"<b>", "1e999", "-1", "９",
)  # fmt: skip
RAW: Final = ("%ff", "%ed%a0%80", "%00", "%0d%0a", "%c0%ae")
"""Escapes that are no UTF-8, or control characters."""
SOURCES: Final = Path(pages.__file__).parent.parent
_NAME: Final = re.compile(r"""(?:fields|query|query_params|form\(request\))(?:\.get(?:list)?\(|, )"(\w+)\"""")
ROUTES: Final = [route for page in pages.PAGES for route in page.ROUTES]
VALUES: Final = [*(quote(odd, safe="") for odd in ODD), *RAW]
CATALOG: Final = ("/recipes", "/submit")
"""Pages that show the server's recipes: until its compiler is warm, they would wait 30 s, and answer that there are none yet."""


def names() -> list[str]:
    """Return the names of all fields and parameters that the pages read."""
    known = {name for path in SOURCES.rglob("*.py") for name in _NAME.findall(path.read_text())}
    assert {"token", "next", "selector", "q", "code", "name"} <= known, known
    return sorted(known - {"csrf_token"})


def fill(route: Route, value: str) -> str:
    return re.sub(r"\{[^}]*\}", value, route.path)


@pytest.fixture(scope="module")
def admin(web: WebFarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Visit, Path]]:
    with running_page(web.process.address, tmp_path_factory.mktemp("odd") / "web.log") as (page, url):
        visit = Visit(url)
        assert visit.sign_in(web.tokens["admin"]).status == 303
        yield visit, page.log


def require_sentence(status: int, log: Path, what: object) -> None:
    assert status < 500 or status in (501, 504), what
    assert "Traceback" not in log.read_text(), what


def try_routes(routes: list[Route], admin: tuple[Visit, Path], value: str) -> None:
    visit, log = admin
    token = csrf_of(visit.get("/server").text)
    query = "&".join(f"{name}={value}" for name in names())
    for route in routes:
        methods = route.methods or set()
        target = fill(route, value)
        if "GET" in methods:
            require_sentence(visit.get(f"{target}?{query}").status, log, (route.path, value))
        if "POST" in methods:
            require_sentence(visit.post_text(target, f"csrf_token={token}&{query}").status, log, (route.path, value))


@pytest.mark.parametrize("value", VALUES)
def test_pages_and_forms_take_any_characters(admin: tuple[Visit, Path], value: str) -> None:
    visit, log = admin
    left_out = (*CATALOG, "/live", "/sign-out")
    try_routes([route for route in ROUTES if route.path not in left_out], admin, value)
    require_sentence(visit.get(f"/live?topic=devices:{value}&after={value}").status, log, value)


@pytest.mark.parametrize("token", [odd for odd in ODD if not (odd.isascii() and odd.isprintable())])
def test_a_token_that_no_header_can_have_is_refused(web: WebFarm, token: str) -> None:
    refused = Visit(web.url).sign_in(f"etf_{token}x")
    assert refused.status == 401
    assert "only printable ASCII" in refused.text
    assert web.page is not None and "Traceback" not in web.page.log.read_text()


@pytest.mark.parametrize(
    "name", ["cookie", "last-event-id", "hx-request", "content-type", "x-csrf-token", "user-agent", "origin"]
)
def test_headers_take_any_characters(admin: tuple[Visit, Path], name: str) -> None:
    visit, log = admin
    for odd in ("é", "\x85", "\xff;=\xa0", "a" * 8_000, "a=b;;;c=d=e", '"', "multipart/form-data; boundary"):
        headers = {name.replace("-", "_"): odd}
        require_sentence(visit.get("/devices", **headers).status, log, odd)
        require_sentence(visit.get("/live?topic=nothing", **headers).status, log, odd)
        require_sentence(visit.post("/reserve", {"selector": "x"}, **headers).status, log, odd)


def test_a_form_of_no_text_is_refused(admin: tuple[Visit, Path]) -> None:
    visit, log = admin
    token = csrf_of(visit.get("/server").text)
    many = f"csrf_token={token}&" + "a&" * 1_500
    for body in ("\x00" * 99, urlencode({"csrf_token": token, "count": "\x00"}), "&" * 999, "=" * 999, many):
        require_sentence(visit.post_text("/reserve", body).status, log, body[:40])


def test_pages_with_the_servers_recipes_take_any_characters(web: WebFarm, admin: tuple[Visit, Path]) -> None:
    routes = [route for route in ROUTES if route.path in CATALOG]
    assert {route.path for route in routes} == set(CATALOG)
    with web.client() as farm:
        assert farm.recipes()
    for value in VALUES:
        try_routes(routes, admin, value)
