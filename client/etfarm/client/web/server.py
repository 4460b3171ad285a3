"""The process of the page: it listens, serves with bounded concurrency, and stops in order."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn

from etfarm.client.web.app import create_app
from etfarm.client.web.connections import Connections, Listener, PromptProtocol
from etfarm.client.web.options import WebOptions
from etfarm.client.web.visitors import Visitors
from etfarm.wire.errors import error_for

MAX_HEADER_BYTES: Final = 32 << 10
BACKLOG: Final = 1_024
"""Number of connections that wait to be accepted."""
STOP_S: Final = 5.0
"""Seconds that requests may take to end when the page is stopped."""
LOGGED: Final = 10
"""Number of messages of one kind that are logged in `LOGGED_S`; visitors cause most of them, and must not fill the log."""
LOGGED_S: Final = 60.0
MAX_KINDS: Final = 1_000
LOGGERS: Final = ("uvicorn.error", "asyncio", *(f"etfarm.client.web.{name}" for name in ("app", "connections", "live")))


class _Server(uvicorn.Server):
    """uvicorn's server; the command handles signals itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LogLimit(logging.Filter):
    """A filter that lets a number of messages of each kind pass in a time, and then says how many it left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}
        """When the current time of a kind, which its logger and first words name, began, and how many messages it has."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message may pass."""
        kind, now = (record.name, str(record.msg).partition("\n")[0][:40]), self._clock()
        if len(self._seen) > MAX_KINDS:
            self._seen.clear()
        began_s, count = self._seen.get(kind, (now, 0))
        if now - began_s > LOGGED_S:
            if count > LOGGED:
                record.msg = f"{record.msg} ({count - LOGGED} more since the last one that was logged)"
            began_s, count = now, 0
        self._seen[kind] = began_s, count + 1
        return count < LOGGED


def listen(host: str, port: int) -> Listener:
    """Return a socket that listens on an address; port 0 lets the system choose.

    Raises:
        CANNOT_LISTEN: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise error_for(
            "CANNOT_LISTEN",
            f"The page cannot listen on {host}:{port}: {error.strerror}.",
            "Give another --listen.",
            host=host,
            port=port,
        ) from None
    return listener


def adopt(descriptor: int) -> Listener:
    """Return the listening socket of a descriptor that this process has inherited."""
    listener = Listener(fileno=descriptor)
    listener.listen(BACKLOG)
    return listener


async def serve(
    options: WebOptions,
    listener: Listener,
    *,
    on_ready: Callable[[Visitors], None],
    stop: asyncio.Event,
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve the page until `stop` is set, and close the listener.

    Args:
        on_ready: called once requests are answered, with the visitors, who can be given a one-time code.
        certificate, key: PEM files for https; none for http.

    Raises:
        PAGE_FAILED: the server ended by itself.
    """
    app = create_app(options)
    visitors: Visitors = app.state.visitors
    listener.connections = Connections(options)
    protocol: Any = partial(PromptProtocol, connections=listener.connections)
    # The connections bound themselves; they close in order later than uvicorn would.
    config = uvicorn.Config(
        app, http=protocol, ws="none", loop="asyncio", lifespan="on", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, h11_max_incomplete_event_size=MAX_HEADER_BYTES, backlog=BACKLOG,
        timeout_keep_alive=3_600, timeout_graceful_shutdown=round(STOP_S), ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    limit = LogLimit()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(limit)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="page")
    stopping = asyncio.create_task(stop.wait(), name="stop of the page")
    try:
        on_ready(visitors)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise error_for("PAGE_FAILED", "The page's server ended by itself.", "Its log has the reason.")
    finally:
        stopping.cancel()
        # Streams end with their visitors; uvicorn would wait for them.
        await visitors.close()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * STOP_S)
        listener.close()
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(limit)
