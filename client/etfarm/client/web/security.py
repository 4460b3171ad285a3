"""What holds for every request and answer: trusted hosts, limits of bodies, and headers that confine the browser."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etfarm.client.web.options import WebOptions
from etfarm.wire.authority import host_of

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""No inline script or style, no evaluation, and no request to another host."""

UPLOAD_TYPE: Final = "application/octet-stream"
"""The content type of an uploaded file, which may be larger than other bodies."""

_HEADERS: Final = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    # The browser would send `Origin: null` with forms under no-referrer.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}


class ResponseHeaders:
    """Adds the headers that confine the browser to every answer; pages are never stored by browsers or proxies."""

    def __init__(self, app: ASGIApp, options: WebOptions) -> None:
        self._app = app
        self._headers = dict(_HEADERS)
        if options.is_secure:
            self._headers["strict-transport-security"] = "max-age=31536000"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(self._headers)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers)


class TrustedHosts:
    """Refuses requests for another host than the page's, as DNS rebinding makes browsers send."""

    def __init__(self, app: ASGIApp, options: WebOptions) -> None:
        self._app = app
        self._hosts = options.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and host_of(sent := Headers(scope=scope).get("host", "")) not in self._hosts:
            text = f"This page is not served for the host {sent[:80]!r}. Add it with `etfarm web --allow-host`.\n"
            await PlainTextResponse(text, status_code=400)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BodyTooLarge(Exception):
    """A request's body is larger than allowed."""


class BodyLimits:
    """Refuses bodies that are too large, by their announced size or while they arrive."""

    def __init__(self, app: ASGIApp, options: WebOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_upload = headers.get("content-type", "").partition(";")[0].strip() == UPLOAD_TYPE
        limit = self._options.max_upload_bytes if is_upload else self._options.max_body_bytes
        refusal = PlainTextResponse(f"The request's body must be at most {limit} bytes.\n", status_code=413)
        announced = headers.get("content-length", "0")
        if not announced.isascii() or not announced.isdigit() or int(announced) > limit:
            await refusal(scope, receive, send)
            return
        received = 0
        has_started = False

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise BodyTooLarge
            return message

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive_limited, send_noting)
        except BodyTooLarge:
            if not has_started:
                await refusal(scope, receive, send)
