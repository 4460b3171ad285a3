"""The patience of clients whose server answers every question, but has none of the farm's services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from etfarm.client.transport.retry import Patience


@asynccontextmanager
async def patience_with_a_server(wait_s: float | None = None) -> AsyncIterator[Patience]:
    """The patience of calls to a server at `s`."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            patience = Patience.of(channel, "s", wait_s)
            yield patience
            patience.presence.close()
    finally:
        await server.stop(None)
