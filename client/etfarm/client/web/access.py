"""Who may see a page: everything but the sign-in and static files needs a visitor."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from etfarm.client.web.options import WebOptions
from etfarm.client.web.visitors import TooManyRequests, Visitors

SIGN_IN: Final = "/sign-in"
ENTER: Final = "/enter"
STATIC: Final = "/static/"
HEALTH: Final = "/healthz"
LIVE: Final = "/live"

_AGAIN: Final = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0"><title>etfarm</title>'
"""A page that opens its own address again: the browser then sends the cookie, which it withholds from links on other sites."""


class AccessCheck:
    """Finds the visitor of each request, whose requests it bounds, and sends others to the sign-in."""

    def __init__(self, app: ASGIApp, options: WebOptions, visitors: Visitors) -> None:
        self._app = app
        self._options = options
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        path = scope["path"].removeprefix(self._options.root_path)
        visitor = self._visitors.find(request)
        scope.setdefault("state", {})["visitor"] = visitor
        is_open = path in (SIGN_IN, ENTER, HEALTH) or path.startswith(STATIC)
        if visitor is None:
            await (self._app if is_open else self._send_to_sign_in(request))(scope, receive, send)
            return
        try:
            with self._visitors.occupy(visitor, is_stream=path == LIVE):
                await self._app(scope, receive, send)
        except TooManyRequests as error:
            await PlainTextResponse(f"{error}\n", status_code=429)(scope, receive, send)

    def _send_to_sign_in(self, request: Request) -> Response:
        sign_in = f"{self._options.root_path}{SIGN_IN}"
        if request.headers.get("hx-request"):
            return Response(status_code=401, headers={"HX-Redirect": sign_in})
        if request.method != "GET" or request.headers.get("sec-fetch-mode", "navigate") != "navigate":
            return Response(status_code=401)
        if request.headers.get("sec-fetch-site") == "cross-site":
            return HTMLResponse(_AGAIN)
        here = self._options.root_path + request.scope["path"].removeprefix(self._options.root_path)
        here += f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{sign_in}?next={quote(here, safe='')}", status_code=303)
