"""One connection of an agent: what is sent to it, and whether it still lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from etfarm.v1 import agent_pb2

HEARTBEAT_INTERVAL_S = 5.0
"""How often an agent is asked to say that it lives."""

_MISSED = 3
"""Heartbeats that may stay out before an agent is taken for dead."""


MAX_WAITING = 10_000
"""Messages for an agent that does not read them."""


class AgentSession:
    """The server's end of AgentService.Connect for one agent.

    Args:
        boot_id: of the machine that the agent runs on; empty where it did not say.
        clock: seconds on a monotonic clock.
        principal: whose token the agent has.
        is_admin: whether that is an admin's, which may serve every device.
    """

    def __init__(
        self, agent_id: str, boot_id: str, clock: Callable[[], float], *, principal: str = "", is_admin: bool = False
    ) -> None:
        self.agent_id = agent_id
        self.boot_id = boot_id
        self.principal = principal
        self.is_admin = is_admin
        self._clock = clock
        self._outgoing: asyncio.Queue[agent_pb2.ServerMessage | None] = asyncio.Queue()
        self._heard_at = clock()
        self._sign = asyncio.Event()
        self._ended = False
        self._on_overflow: Callable[[], object] = lambda: None

    def heard(self) -> None:
        """The agent said something."""
        self._heard_at = self._clock()
        self._sign.set()

    async def is_heard_again(self) -> bool:
        """Waits for the agent's next sign of life, until it counts as dead if none comes."""
        self._sign.clear()
        try:
            async with asyncio.timeout(max(self.silence_left_s(), 0)):
                await self._sign.wait()
        except TimeoutError:
            return False
        return self.is_alive()

    def is_alive(self) -> bool:
        """Whether the agent is connected and was heard lately."""
        return not self._ended and self._clock() - self._heard_at < _MISSED * HEARTBEAT_INTERVAL_S

    def silence_left_s(self) -> float:
        """Seconds until the agent counts as dead if nothing more comes."""
        return self._heard_at + _MISSED * HEARTBEAT_INTERVAL_S - self._clock()

    def send(self, message: agent_pb2.ServerMessage) -> None:
        """Queues a message; never waits. After the end it goes nowhere: what matters is said again at the next Hello.

        An agent that does not read is ended.
        """
        if self._ended:
            return
        if self._outgoing.qsize() >= MAX_WAITING:
            self._outgoing = asyncio.Queue()
            self.end()
            self._on_overflow()
            return
        self._outgoing.put_nowait(message)

    def on_overflow(self, do: Callable[[], object]) -> None:
        """Calls `do` when the agent is ended because it does not read: its stream has to be cut from outside."""
        self._on_overflow = do

    def end(self) -> None:
        """Closes the stream once what is queued was sent."""
        if not self._ended:
            self._ended = True
            self._outgoing.put_nowait(None)
            self._sign.set()

    async def outgoing(self) -> AsyncIterator[agent_pb2.ServerMessage]:
        """The messages to send, until the end."""
        while (message := await self._outgoing.get()) is not None:
            yield message
