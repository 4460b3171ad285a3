"""Repetition of calls while the server is away.

`Stubs.of` wraps each unary call once. Most are safe to repeat: reads have no effect, Submit has a request_id, and Cancel and
AddBundle are idempotent. Uploads are resumed where they broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

import grpc

from etfarm.client.errors import EtfarmError, from_rpc_error
from etfarm.client.transport.presence import Presence, Say
from etfarm.client.transport.server_wait import BRIEF_S, LASTING_S
from etfarm.wire.retry_backoff import retry_backoff
from etfarm.wire.status import is_unanswered

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 1.0
_SHOWN_AFTER: Final = 3
"""Number of times in a row that a server which is there cannot do something, after which its reason is shown."""

Answer = TypeVar("Answer")
RequestT = TypeVar("RequestT")
StubT = TypeVar("StubT")

Remedy = Callable[[], str]
"""Callback that returns what to do when the server has not come back."""


@dataclass(frozen=True)
class Patience:
    """How long calls wait for a server that is away."""

    presence: Presence
    for_s: float = BRIEF_S
    """Seconds from the first failure after a success; a call is made once if 0."""
    lasting_s: float = LASTING_S
    """The same for calls about what goes on while the server is away."""
    remedy: Remedy | None = None
    """Replaces the remedy of the error when the time is up."""

    @classmethod
    def of(cls, channel: grpc.aio.Channel, server: str, wait_s: float | None = None, say: Say | None = None) -> Patience:
        """Return the patience of a connection's calls.

        Args:
            channel, server, say: as of `Presence`.
            wait_s: seconds that all calls may wait; the defaults when None.
        """
        presence = Presence(channel, server, say)
        return cls(presence) if wait_s is None else cls(presence, wait_s, wait_s)

    @property
    def server(self) -> str:
        """The server's address, for error messages."""
        return self.presence.server

    def backoff(self) -> Backoff:
        """Return the pauses of one call."""
        return Backoff(self)


class Backoff:
    """Growing pauses between the tries of one call.

    Args:
        patience: how long all of them may take.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self.reset()

    def reset(self) -> None:
        """Record a success: the next failure counts as the first one."""
        self._pauses = retry_backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        self._until_s: float | None = None
        self._refusals = 0
        """Number of failures after which the server answered when it was asked how it is."""

    async def wait(self) -> bool:
        """Pause, longer each time, and return True; return False at once when the time is up."""
        now_s = asyncio.get_running_loop().time()
        if self._until_s is None:
            self._until_s = now_s + self._patience.for_s
        if now_s >= self._until_s:
            return False
        await asyncio.sleep(min(next(self._pauses), self._until_s - now_s))
        return True

    async def after(self, error: grpc.aio.AioRpcError, *, also: Collection[grpc.StatusCode] = ()) -> None:
        """Wait until a call that failed may be made again.

        Args:
            also: codes of errors after which the call is repeated though the server has answered.

        Raises:
            EtfarmError: the server's error, or SERVER_UNREACHABLE when the time is up or no wait can help.
        """
        failure = from_rpc_error(error, server=self._patience.server)
        if error.code() not in also:
            if not is_unanswered(error) or self._patience.presence.is_out_of_reach(error):
                raise failure from None
            await self.while_away(failure)
        elif not await self.wait():
            raise failure from None

    async def while_away(self, failure: EtfarmError) -> None:
        """Wait until the server answers, after an error that says that it does not.

        Raises:
            EtfarmError: why the server does not answer by then, when the time is up; `failure` if it was not asked again.
        """
        presence = self._patience.presence
        if await self.wait() and self._until_s is not None and await presence.wait(self._until_s):
            self._refusals += 1
            if self._refusals == _SHOWN_AFTER:  # such as one whose S3 server is away
                presence.say(f"{failure.message} Waiting.")
            return
        # What a server said when it began to stop is no longer true when none has come back.
        if presence.last_error is not None and is_unanswered(presence.last_error):
            failure = from_rpc_error(presence.last_error, server=self._patience.server)
        if self._patience.remedy is not None:
            failure.advise(self._patience.remedy())
        raise failure from None


class RepeatedCall(Generic[RequestT, Answer]):
    """A unary call that is made again while the server is away, and that raises the library's own errors."""

    def __init__(self, call: Callable[..., Awaitable[Answer]], patience: Patience) -> None:
        """Wrap a stub's call.

        Args:
            call: a call that is safe to repeat, unless the patience is of 0 seconds.
        """
        self._call = call
        self._patience = patience

    async def __call__(self, request: RequestT) -> Answer:
        """Return the answer.

        Raises:
            EtfarmError: the server's error, or SERVER_UNREACHABLE.
        """
        return await repeat(lambda: self._call(request), self._patience.backoff())


def with_repeated_calls(stub: StubT, patience: Patience, *, once: Collection[str] = (), raw: Collection[str] = ()) -> StubT:
    """Replace each unary call of a stub by a `RepeatedCall`, and return the stub. Streams stay as they are.

    Args:
        once: names of calls that are not safe to repeat, such as one that creates a secret; they fail at once.
        raw: names of calls that stay as they are.
    """
    for name, call in vars(stub).items():
        if isinstance(call, grpc.aio.UnaryUnaryMultiCallable) and name not in raw:
            setattr(stub, name, RepeatedCall(call, replace(patience, for_s=0.0) if name in once else patience))
    return stub


async def repeat(call: Callable[[], Awaitable[Answer]], backoff: Backoff) -> Answer:
    """Make a call that is safe to repeat until it succeeds, and return its answer.

    Raises:
        EtfarmError: the server's error, or SERVER_UNREACHABLE if the server does not come back.
    """
    is_repeated = False
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            try:
                await backoff.after(error)
            except EtfarmError as failure:
                failure.is_repeated = is_repeated
                raise
            is_repeated = True
