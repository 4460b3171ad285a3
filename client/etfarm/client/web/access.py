"""Who may see a page: everything but the sign-in and static files needs a visitor. Whose turn it is, and from which address."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import quote

from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from etfarm.client.web.connections import Place
from etfarm.client.web.options import WebOptions, plain_address
from etfarm.client.web.turns import Pace, TooManyRequests
from etfarm.client.web.visitors import Visitors
from etfarm.wire.authority import network_of
from etfarm.wire.channel import CALL_METADATA
from etfarm.wire.names import FORWARDED_KEY_METADATA, FORWARDED_PEER_METADATA

SIGN_IN: Final = "/sign-in"
ENTER: Final = "/enter"
STATIC: Final = "/static/"
HEALTH: Final = "/healthz"
LIVE: Final = "/live"
MAX_FORWARDED: Final = 16
"""Number of addresses that X-Forwarded-For is read for, from its end."""

_AGAIN: Final = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0"><title>etfarm</title>'
"""A page that opens its own address again: the browser then sends the cookie, which it withholds from links on other sites."""


class Arrivals:
    """Finds out for each request who sent it and from where, counts its connection for them, and lets it wait for its turn."""

    def __init__(self, app: ASGIApp, options: WebOptions, visitors: Visitors) -> None:
        self._app = app
        self._options = options
        self._visitors = visitors
        self._pace = Pace(options.requests_per_s, options.requests_at_once)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        visitor = self._visitors.find(request)
        host, port = address_of(request, self._options)
        owner = "" if self._options.is_proxy(host) else network_of(host)
        state = scope.setdefault("state", {})
        state["visitor"], state["owner"] = visitor, owner
        if isinstance(place := state.get("connection"), Place):
            place.enter(visitor.account.digest if visitor is not None else "")
        if self._options.forwarded_key:
            CALL_METADATA.set(_metadata(host, port, self._options.forwarded_key))
        try:
            # Behind a proxy that names no visitors, all of them would wait for one.
            whose = visitor.cookie if visitor is not None else owner
            if whose and (delay_s := self._pace.delay_s(whose)):
                await asyncio.sleep(delay_s)
        except TooManyRequests as error:
            await _refuse(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class AccessCheck:
    """Lets visitors see pages, whose requests it bounds, and sends others to the sign-in."""

    def __init__(self, app: ASGIApp, options: WebOptions, visitors: Visitors) -> None:
        self._app = app
        self._options = options
        self._visitors = visitors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(self._options.root_path)
        visitor = scope["state"]["visitor"]
        is_open = path in (SIGN_IN, ENTER, HEALTH) or path.startswith(STATIC)
        if visitor is None:
            await (self._app if is_open else self._send_to_sign_in(Request(scope)))(scope, receive, send)
            return
        try:
            with self._visitors.occupy(visitor, is_stream=path == LIVE):
                await self._app(scope, receive, send)
        except TooManyRequests as error:
            await _refuse(error)(scope, receive, send)

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


def _refuse(error: TooManyRequests) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=429, headers={"retry-after": "1"})


def address_of(request: HTTPConnection, options: WebOptions) -> tuple[str, int]:
    """Return the address and port that a request comes from; those that a trusted proxy names, with port 0."""
    host, port = request.client or ("", 0)
    if not options.is_trusted_proxy(host):
        return host, port
    named = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
    for text in reversed(named[-MAX_FORWARDED:]):  # what a visitor sends itself is on the left
        if plain_address(text.strip()) is None:
            break
        host, port = text.strip(), 0
        if not options.is_trusted_proxy(host):
            break
    return host, port


def _metadata(host: str, port: int, key: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that names a visitor's address to the server that started the page."""
    address = plain_address(host)
    if address is None:
        return ()
    peer = f"ipv6:[{address}]:{port}" if address.version == 6 else f"ipv4:{address}:{port}"
    return (FORWARDED_PEER_METADATA, peer), (FORWARDED_KEY_METADATA, key)
