"""Repetition of calls while the server is away for a moment.

Every rpc of the client except Upload is safe to repeat: reads have no effect, Submit has a request_id, and Cancel and
AddBundle are idempotent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from etfarm.client.errors import from_rpc_error
from etfarm.wire.retry_backoff import retry_backoff

PATIENCE_S = 30.0
"""Seconds that a server that answered before may be away: a restart takes seconds."""

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
        """Record a success: the next failure counts as the first one."""
        self._pauses, self._until_s = retry_backoff(FIRST_DELAY_S, LONGEST_DELAY_S), None

    async def wait(self) -> bool:
        """Pause, longer each time, and return True; return False at once when the time is up."""
        now = asyncio.get_running_loop().time()
        if self._until_s is None:
            self._until_s = now + self._patience_s
        if now >= self._until_s:
            return False
        await asyncio.sleep(min(next(self._pauses), self._until_s - now))
        return True


async def repeat(call: Callable[[], Awaitable[Answer]], *, server: str, patience_s: float = PATIENCE_S) -> Answer:
    """Make a call that is safe to repeat until it succeeds, and return its answer.

    Raises:
        EtfarmError: the server's error, or SERVER_UNREACHABLE after `patience_s` seconds without an answer.
    """
    backoff = Backoff(patience_s)
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or not await backoff.wait():
                raise from_rpc_error(error, server=server) from None
