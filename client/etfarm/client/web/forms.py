"""Requests that change something: they come from the page itself, and carry a token that only the page can have.

`FormCheck` refuses every POST whose Origin is another site, or whose token does not belong to the visitor's cookie. Forms have
the token in the field `csrf_token`, scripts in the header `X-CSRF-Token`. A form's fields are in `form(request)`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from typing import Final
from urllib.parse import parse_qsl

from starlette.datastructures import Headers, ImmutableMultiDict
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from etfarm.client.web.options import WebOptions

CSRF_FIELD: Final = "csrf_token"
CSRF_HEADER: Final = "x-csrf-token"
FORM_TYPE: Final = "application/x-www-form-urlencoded"
MAX_FIELDS: Final = 1_000
FORM_S: Final = 30.0
"""Seconds that a browser may take to send a form."""

Fields = ImmutableMultiDict[str, str]
"""The fields of a form by name; `getlist` returns all values of one."""

_SAFE_METHODS: Final = ("GET", "HEAD", "OPTIONS")
_NONCE_BYTES: Final = 16


class CsrfTokens:
    """Tokens that belong to a visitor's cookie. Each is different, so that a compressed page does not reveal it."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def create(self, cookie: str) -> str:
        """Return a new token for the visitor with this cookie."""
        nonce = secrets.token_hex(_NONCE_BYTES)
        return f"{nonce}.{self._sign(nonce, cookie)}"

    def is_valid(self, token: str, cookie: str) -> bool:
        """Return whether `create` returned the token for this cookie."""
        nonce, _, signature = token.partition(".")
        return bool(cookie) and token.isascii() and hmac.compare_digest(signature, self._sign(nonce, cookie))

    def _sign(self, nonce: str, cookie: str) -> str:
        return hmac.new(self._key, f"{nonce}.{cookie}".encode(), hashlib.sha256).hexdigest()


class FormCheck:
    """Refuses requests that change something unless the page itself sent them."""

    def __init__(self, app: ASGIApp, options: WebOptions, tokens: CsrfTokens, cookie_name: str) -> None:
        self._app = app
        self._options = options
        self._tokens = tokens
        self._cookie_name = cookie_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if not self._is_own_origin(request.headers):
            await _refuse("The request does not come from this page. Open the page and try again.")(scope, receive, send)
            return
        token = request.headers.get(CSRF_HEADER, "")
        content_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if content_type == FORM_TYPE:
            try:
                async with asyncio.timeout(FORM_S):
                    receive, body = await _buffer(receive)
            except TimeoutError:
                await PlainTextResponse(f"The form did not arrive within {FORM_S:g} s.\n", status_code=408)(scope, receive, send)
                return
            try:
                pairs = parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
            except ValueError:
                await _refuse(f"A form must have at most {MAX_FIELDS} fields.")(scope, receive, send)
                return
            fields: Fields = ImmutableMultiDict(pairs)
            scope.setdefault("state", {})["form"] = fields
            token = token or fields.get(CSRF_FIELD, "")
        if not self._tokens.is_valid(token, request.cookies.get(self._cookie_name, "")):
            await _refuse("The form is too old. Reload the page and try again.")(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_own_origin(self, headers: Headers) -> bool:
        origin = headers.get("origin", "").lower()
        if not origin:
            return headers.get("sec-fetch-site") == "same-origin"
        if origin == self._options.public_origin:
            return True
        scheme = "https" if self._options.is_secure else "http"
        return origin == f"{scheme}://{headers.get('host', '').lower()}"


def form(request: Request) -> Fields:
    """Return the fields of the form that was sent; empty if the body is no form."""
    fields = request.scope.get("state", {}).get("form")
    return fields if isinstance(fields, ImmutableMultiDict) else ImmutableMultiDict()


def _refuse(text: str) -> PlainTextResponse:
    return PlainTextResponse(f"{text}\n", status_code=403)


async def _buffer(receive: Receive) -> tuple[Receive, bytes]:
    """Read a body, and return it with a function that receives it again."""
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    is_replayed = False

    async def replay() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay, body
