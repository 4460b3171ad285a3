"""Repetition of calls while the server is unavailable for a moment.

`Stubs.of` wraps each unary call once. Most are safe to repeat: reads have no effect, Submit has a request_id, and Cancel and
AddBundle are idempotent. Uploads are resumed where they broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, TypeVar

import grpc

from etfarm.client.errors import from_rpc_error
from etfarm.wire.retry_backoff import retry_backoff
from etfarm.wire.status import is_unanswered

PATIENCE_S = 30.0
"""Seconds that a server that answered before may be away: a restart takes seconds."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 2.0

Answer = TypeVar("Answer")
RequestT = TypeVar("RequestT")
StubT = TypeVar("StubT")


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


class RepeatedCall(Generic[RequestT, Answer]):
    """A unary call that is made again while the server is unavailable, and that raises the library's own errors."""

    def __init__(self, call: Callable[..., Awaitable[Answer]], server: str, patience_s: float = PATIENCE_S) -> None:
        """Wrap a stub's call.

        Args:
            call: a call that is safe to repeat, unless `patience_s` is 0.
            server: address for error messages.
            patience_s: seconds without an answer after which the call fails.
        """
        self._call = call
        self._server = server
        self._patience_s = patience_s

    async def __call__(self, request: RequestT) -> Answer:
        """Return the answer.

        Raises:
            EtfarmError: the server's error, or SERVER_UNREACHABLE.
        """
        return await repeat(lambda: self._call(request), server=self._server, patience_s=self._patience_s)


def with_repeated_calls(stub: StubT, server: str, *, once: Collection[str] = (), raw: Collection[str] = ()) -> StubT:
    """Replace each unary call of a stub by a `RepeatedCall`, and return the stub. Streams stay as they are.

    Args:
        server: address for error messages.
        once: names of calls that are not safe to repeat, such as one that creates a secret; they fail at once.
        raw: names of calls that stay as they are.
    """
    for name, call in vars(stub).items():
        if isinstance(call, grpc.aio.UnaryUnaryMultiCallable) and name not in raw:
            setattr(stub, name, RepeatedCall(call, server, 0.0 if name in once else PATIENCE_S))
    return stub


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
            if not is_unanswered(error) or not await backoff.wait():
                raise from_rpc_error(error, server=server) from None
