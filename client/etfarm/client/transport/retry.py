"""Steps 1 and 10, client: calls that may be repeated are, while the server is away for a moment.

Every rpc of the client but Upload is safe to repeat: the reading ones, Submit by its request_id, Cancel and AddBundle by
what they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from etfarm.client.errors import from_rpc_error
from etfarm.wire.retry_backoff import retry_backoff

PATIENCE_S = 30.0
"""How long a server that has answered before may be away: a restart takes seconds."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0

Answer = TypeVar("Answer")


class Backoff:
    """Growing pauses for a bounded time, measured from the first failure after a success."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._pauses = retry_backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        self._until_s: float | None = None

    def reset(self) -> None:
        """It worked: the next failure is a first one."""
        self._pauses, self._until_s = retry_backoff(FIRST_DELAY_S, LONGEST_DELAY_S), None

    async def wait(self) -> bool:
        """Pauses, longer each time; False, at once, when the time is up."""
        now = asyncio.get_running_loop().time()
        if self._until_s is None:
            self._until_s = now + self._patience_s
        if now >= self._until_s:
            return False
        await asyncio.sleep(min(next(self._pauses), self._until_s - now))
        return True


async def repeat(call: Callable[[], Awaitable[Answer]], *, server: str, patience_s: float = PATIENCE_S) -> Answer:
    """The answer of a call that may be made several times.

    Raises:
        EtfarmError: what the server answered, or SERVER_UNREACHABLE after `patience_s` without one.
    """
    backoff = Backoff(patience_s)
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or not await backoff.wait():
                raise from_rpc_error(error, server=server) from None
