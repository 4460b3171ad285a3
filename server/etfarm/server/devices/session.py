"""One connection of an agent: its outgoing messages, and its signs of life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from etfarm.v1 import agent_pb2
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION

HEARTBEAT_INTERVAL_S = 5.0
"""Interval in seconds at which an agent must send a heartbeat."""

_MAX_MISSED = 3
"""Number of missed heartbeats after which an agent counts as dead."""

MAX_WAITING = 10_000
"""Maximum number of messages that wait to be read by an agent."""

MAX_UNREAD = 1_000
"""Number of them from which on an agent's own messages are not received: each may cause an answer."""


_MAX_NAME = 100
"""Maximum length of the version and the host name that are kept of an agent."""


class AgentSession:
    """The server's end of AgentService.Connect for one agent.

    Args:
        boot_id: boot id of the agent's machine; empty if the agent did not send it.
        clock: returns seconds on a monotonic clock.
        principal: the owner of the agent's token.
        is_admin: whether the principal is an admin, whose agents may serve every device.
        hello: the connection's first message; what it says of the agent's version is kept.
        protocol_version: the version of the protocol of this connection; one that the server does not serve if the agent is only
            let in to be upgraded.
    """

    def __init__(
        self,
        agent_id: str,
        boot_id: str,
        clock: Callable[[], float],
        *,
        principal: str = "",
        is_admin: bool = False,
        hello: agent_pb2.Hello | None = None,
        protocol_version: int = PROTOCOL_VERSION,
    ) -> None:
        hello = hello or agent_pb2.Hello()
        self.version = hello.agent_version[:_MAX_NAME]
        self.host = hello.host[:_MAX_NAME]
        self.allows_upgrade = hello.allows_upgrade
        self.is_outdated = protocol_version < OLDEST_PROTOCOL_VERSION
        """Whether the agent can only be upgraded, and its devices get no work."""
        self.agent_id = agent_id
        self.boot_id = boot_id
        self.principal = principal
        self.is_admin = is_admin
        self._clock = clock
        self._outgoing: asyncio.Queue[agent_pb2.ServerMessage | None] = asyncio.Queue()
        self._alive_at_s = clock()
        self._sign = asyncio.Event()
        self._has_read = asyncio.Event()
        self._ended = False
        self._on_overflow: Callable[[], object] = lambda: None

    def mark_alive(self) -> None:
        """Record a sign of life."""
        self._alive_at_s = self._clock()
        self._sign.set()

    async def is_alive_again(self) -> bool:
        """Wait for the agent's next sign of life; return False if the agent counts as dead first."""
        self._sign.clear()
        try:
            async with asyncio.timeout(max(self.silence_left_s(), 0)):
                await self._sign.wait()
        except TimeoutError:
            return False
        return self.is_alive()

    def is_alive(self) -> bool:
        """Return whether the agent is connected and has recently shown a sign of life."""
        return not self._ended and self._clock() - self._alive_at_s < _MAX_MISSED * HEARTBEAT_INTERVAL_S

    def silence_left_s(self) -> float:
        """Return the seconds until the agent counts as dead without a further sign of life."""
        return self._alive_at_s + _MAX_MISSED * HEARTBEAT_INTERVAL_S - self._clock()

    def send(self, message: agent_pb2.ServerMessage) -> None:
        """Queue a message without waiting. After the end of the session it is dropped: the next Hello restores the state.

        If the agent does not read its messages, its connection is ended.
        """
        if self._ended:
            return
        if self._outgoing.qsize() >= MAX_WAITING:
            self._outgoing = asyncio.Queue()
            self.end()
            self._on_overflow()
            return
        self._outgoing.put_nowait(message)

    async def wait_read(self) -> None:
        """Wait until fewer than `MAX_UNREAD` messages wait to be read."""
        while not self._ended and self._outgoing.qsize() >= MAX_UNREAD:
            self._has_read.clear()
            await self._has_read.wait()

    def on_overflow(self, do: Callable[[], object]) -> None:
        """Register a function to call when the session ends because the agent does not read, to cancel its stream."""
        self._on_overflow = do

    def end(self) -> None:
        """Close the stream after the queued messages."""
        if not self._ended:
            self._ended = True
            self._outgoing.put_nowait(None)
            self._sign.set()
            self._has_read.set()

    async def outgoing(self) -> AsyncIterator[agent_pb2.ServerMessage]:
        """Yield the messages to send, until the session ends."""
        while (message := await self._outgoing.get()) is not None:
            self._has_read.set()
            yield message
