"""One connection of an agent: its outgoing messages, and its signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from etfarm.v1 import agent_pb2

HEARTBEAT_INTERVAL_S = 5.0
"""Interval at which an agent has to send a heartbeat."""

_MISSED = 3
"""Number of missing heartbeats after which an agent counts as dead."""

MAX_WAITING = 10_000
"""Maximum number of messages that wait for an agent to read them."""


class AgentSession:
    """The server's end of AgentService.Connect for one agent.

    Args:
        boot_id: of the machine that the agent runs on; empty if the agent did not send it.
        clock: seconds on a monotonic clock.
        principal: the owner of the agent's token.
        is_admin: whether that is an admin, whose agent may serve every device.
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
        self._alive_at_s = clock()
        self._sign = asyncio.Event()
        self._ended = False
        self._on_overflow: Callable[[], object] = lambda: None

    def mark_alive(self) -> None:
        """Record a sign of life."""
        self._alive_at_s = self._clock()
        self._sign.set()

    async def is_alive_again(self) -> bool:
        """Wait for the agent's next sign of life; return False if it counts as dead before."""
        self._sign.clear()
        try:
            async with asyncio.timeout(max(self.silence_left_s(), 0)):
                await self._sign.wait()
        except TimeoutError:
            return False
        return self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the agent is connected and showed a sign of life lately."""
        return not self._ended and self._clock() - self._alive_at_s < _MISSED * HEARTBEAT_INTERVAL_S

    def silence_left_s(self) -> float:
        """Return the seconds until the agent counts as dead without a further sign of life."""
        return self._alive_at_s + _MISSED * HEARTBEAT_INTERVAL_S - self._clock()

    def send(self, message: agent_pb2.ServerMessage) -> None:
        """Queue a message without waiting. After the end it is dropped: the answer to the next Hello repeats what matters.

        The connection of an agent that does not read its messages is ended.
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
        """Call `do` when the session ends because the agent does not read: its stream has to be cut from outside."""
        self._on_overflow = do

    def end(self) -> None:
        """Close the stream after the queued messages."""
        if not self._ended:
            self._ended = True
            self._outgoing.put_nowait(None)
            self._sign.set()

    async def outgoing(self) -> AsyncIterator[agent_pb2.ServerMessage]:
        """Yield the messages to send, until the end."""
        while (message := await self._outgoing.get()) is not None:
            yield message
