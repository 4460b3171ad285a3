"""The HTTP address of a server's metrics and health: /metrics, /healthz and /readyz, one request for each connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Final

import structlog

from etfarm.wire.authority import host_of, is_address
from etfarm.wire.channel import Address
from etfarm.wire.errors import error_for
from etfarm.wire.shielding import end_tasks

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
        hosts: names that a request may be for, beside addresses, localhost and the names of this machine. A site that lets its
            own name lead to this address makes browsers send that name.
    """

    def __init__(self, pages: Mapping[str, Page], timeout_s: float = TIMEOUT_S, hosts: Collection[str] = ()) -> None:
        self._pages = pages
        self._timeout_s = timeout_s
        self._hosts = {"localhost", *(host_of(host) for host in hosts)}
        self._open: dict[asyncio.Task[None], None] = {}
        """The connections, the oldest one first."""
        self._server: asyncio.Server | None = None
        self._naming: asyncio.Task[None] | None = None

    async def start(self, address: Address) -> str:
        """Listen; return the address with the chosen port.

        Raises:
            CANNOT_LISTEN: the address cannot be used.
        """
        host, _, port = address.text.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._accept, host.strip("[]"), int(port), limit=_MAX_HEAD_BYTES)
        except (OSError, ValueError) as error:
            what = f"Cannot listen on {address.text} for metrics: {getattr(error, 'strerror', None) or 'not HOST:PORT'}."
            raise error_for("CANNOT_LISTEN", what, "Choose another --metrics address.", address=address.text) from None
        self._hosts |= {host_of(host), host_of(socket.gethostname())}
        self._naming = asyncio.create_task(self._add_full_name(), name="full host name")
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening, and cut open connections."""
        if self._naming is not None:
            self._naming.cancel()
            await asyncio.wait({self._naming})
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        await end_tasks(*self._open)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:  # a request takes milliseconds, so the oldest one is no scrape
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._serve(reader, writer), name="metrics")
        self._open[task] = None

        def end(_: object) -> None:
            self._open.pop(task, None)
            # A client that reads nothing would keep an orderly end, and its place, for ever.
            writer.transport.abort()

        task.add_done_callback(end)

    async def _add_full_name(self) -> None:
        """Learn this machine's name with its domain, which may take a name server seconds."""
        with contextlib.suppress(OSError):
            self._hosts.add(host_of(await asyncio.to_thread(socket.getfqdn)))

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

    def _is_own(self, authority: str) -> bool:
        host = host_of(authority)
        return bool(host) and (is_address(host) or host in self._hosts)

    async def _answer(self, head: bytes) -> Answer:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "not HTTP/1")
        if words[0] not in ("GET", "HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        fields = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines[1:])]
        if not all(self._is_own(value) for name, value in fields if name == "host"):
            return _text(HTTPStatus.MISDIRECTED_REQUEST, "not served for this host: use an IP address, or --metrics-host NAME")
        page = self._pages.get(words[1].partition("?")[0])
        if page is None:
            return _text(HTTPStatus.NOT_FOUND, "\n".join(self._pages))
        headers = dict(fields)
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
