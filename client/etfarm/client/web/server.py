"""The process of the page: it listens, serves with bounded concurrency, and stops in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvicorn

from etfarm.client.errors import FarmError, Kind, UserError
from etfarm.client.web.app import create_app
from etfarm.client.web.connections import PromptProtocol
from etfarm.client.web.options import WebOptions
from etfarm.client.web.visitors import Visitors

MAX_CONNECTIONS: Final = 1_024
MAX_HEADER_BYTES: Final = 32 << 10
STOP_S: Final = 5.0
"""Seconds that requests may take to end when the page is stopped."""


class CannotListen(UserError):
    """Error of an address that the page cannot listen on."""

    reason = "CANNOT_LISTEN"


class PageFailed(FarmError):
    """Error of a page whose server ended by itself."""

    reason = "PAGE_FAILED"
    kind = Kind.UNAVAILABLE


class _Server(uvicorn.Server):
    """uvicorn's server; the command handles signals itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0 lets the system choose.

    Raises:
        CannotListen: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"The page cannot listen on {host}:{port}: {error.strerror}.", "Give another --listen.", host=host, port=port
        ) from None
    return listener


async def serve(
    options: WebOptions,
    listener: socket.socket,
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
        PageFailed: the server ended by itself.
    """
    app = create_app(options)
    visitors: Visitors = app.state.visitors
    config = uvicorn.Config(
        app, http=PromptProtocol, ws="none", loop="asyncio", lifespan="on", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES, timeout_keep_alive=30, timeout_graceful_shutdown=round(STOP_S),
        ssl_certfile=certificate, ssl_keyfile=key,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="page")
    stopping = asyncio.create_task(stop.wait(), name="stop of the page")
    try:
        on_ready(visitors)
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise PageFailed("The page's server ended by itself.", "Its log has the reason.")
    finally:
        stopping.cancel()
        # Streams end with their visitors; uvicorn would wait for them.
        await visitors.close()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=2 * STOP_S)
        listener.close()
