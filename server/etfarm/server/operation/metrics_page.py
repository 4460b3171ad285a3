"""The HTTP address of a server's metrics and health: /metrics, /healthz and /readyz, one request for each connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final

import structlog

from etfarm.server.rpc.door.listening import CannotListen
from etfarm.wire.channel import Address

log = structlog.get_logger()

_MAX_CONNECTIONS: Final = 16
_MAX_HEAD_BYTES: Final = 8 << 10
TIMEOUT_S: Final = 10.0
_TEXT: Final = "text/plain; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]
"""Status, content type and body."""

Page = Callable[[str], Awaitable[Answer]]
"""Function that takes the request's Accept header and returns the answer."""


class MetricsPage:
    """A bounded HTTP server for GET requests.

    A library would bring a web framework for three pages; Prometheus and probes send one small request at a time.

    Args:
        pages: the pages by path.
        timeout_s: time limit of a connection.
    """

    def __init__(self, pages: Mapping[str, Page], timeout_s: float = TIMEOUT_S) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        self._open: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, address: Address) -> str:
        """Listen; return the address with the chosen port.

        Raises:
            CannotListen: the address cannot be used.
        """
        host, _, port = address.text.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._accept, host.strip("[]"), int(port), limit=_MAX_HEAD_BYTES)
        except (OSError, ValueError) as error:
            what = f"Cannot listen on {address.text} for metrics: {getattr(error, 'strerror', None) or 'not HOST:PORT'}."
            raise CannotListen(what, "Choose another --metrics address.", address=address.text) from None
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, and cut open connections."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="metrics")
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                status, kind, body = await self._answer(await reader.readuntil(b"\r\n\r\n"))
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n".encode() + body)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            log.debug("a request for metrics was cut", why=str(error))
        except Exception:
            log.exception("a request for metrics failed")
        finally:
            # A client that reads nothing would keep an orderly end, and its place, for ever.
            writer.transport.abort()

    async def _answer(self, head: bytes) -> Answer:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "not HTTP/1")
        if words[0] not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return _text(HTTPStatus.NOT_FOUND, "\n".join(self._pages))
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        status, kind, body = await page(headers.get("accept", ""))
        return status, kind, b"" if words[0] == "HEAD" else body


def _text(status: HTTPStatus, text: str) -> Answer:
    return status, _TEXT, f"{text}\n".encode()


def probe(is_healthy: Callable[[], str]) -> Page:
    """Return the page of a probe.

    Args:
        is_healthy: returns the reason why the probe fails; empty if it succeeds.
    """

    async def answer(_: str) -> Answer:
        why = is_healthy()
        return _text(HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK, why or "ok")

    return answer
