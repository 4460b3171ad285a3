"""Whether the server of a connection answers: one question for all calls that wait, and what is said about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire.failover import FailoverChannel, settle
from etfarm.wire.retry_backoff import retry_backoff
from etfarm.wire.status import is_hopeless, is_unanswered

AWAY: Final = "The server is away, waiting."
BACK: Final = "The server is back."

ANSWER_S: Final = 10.0
"""Seconds that the answer to one question may take; a server on the other side of the world needs one."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 0.5

Say = Callable[[str], None]


class Presence:
    """The server of one connection.

    Args:
        channel: the connection, to one server or to several of one farm.
        server: its address for error messages, or several with commas.
        say: called with a sentence when the server is away, and when it is back.
    """

    def __init__(self, channel: grpc.aio.Channel, server: str, say: Say | None = None) -> None:
        self.server = server
        self._channel = channel
        self._farm = farm_pb2_grpc.FarmServiceStub(channel)
        self.say = say if say is not None else lambda _: None
        """Callback that gets a sentence for who waits."""
        self.last_error: grpc.aio.AioRpcError | None = None
        """Why the last question of `wait` had no answer; None if it had one."""
        self._has_answered = False
        self._asking: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()

    async def ask(self) -> farm_pb2.ServerInfo:
        """Ask the server once, and return what it says of itself.

        Raises:
            grpc.aio.AioRpcError: it does not answer, or refuses the caller.
        """
        try:
            info = await self._farm.GetServerInfo(farm_pb2.GetServerInfoRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            why = f"no answer within {ANSWER_S:.0f} s"
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=why
            ) from None
        self._has_answered = True
        return info

    def is_out_of_reach(self, error: grpc.aio.AioRpcError) -> bool:
        """Return whether no wait can help a call that failed: its server has another certificate, or there is no such name.

        Of several servers, another one may answer. And what has answered before is there, whatever is wrong at the moment.
        """
        if self._has_answered or not is_hopeless(error.code(), error.details()):
            return False
        return not isinstance(self._channel, FailoverChannel) or self._channel.is_hopeless

    async def wait(self, until_s: float) -> bool:
        """Wait until the server answers, or until `until_s` by the clock of the event loop; return whether it answers."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_again(), name="server that is away")
        left_s = max(0.0, until_s - asyncio.get_running_loop().time())
        done, _ = await asyncio.wait({self._asking}, timeout=left_s)
        return bool(done)

    async def _ask_again(self) -> None:
        """Ask until the server answers, or until no wait can help."""
        is_away = False
        for pause_s in retry_backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S):
            await settle(self._channel)
            try:
                await self.ask()
                self.last_error = None
                break
            except grpc.aio.AioRpcError as error:
                self.last_error = error
                if not is_unanswered(error):
                    break
                if self.is_out_of_reach(error):
                    return
            if not is_away:
                is_away = True
                self.say(AWAY)
            await asyncio.sleep(pause_s)
        if is_away:
            self.say(BACK)
