"""Connections of a standby to the leading server, enough of them for all forwarded calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import grpc
import structlog

from etfarm.server.cluster.errors import NoLeader
from etfarm.server.cluster.leadership import Leader, Leadership
from etfarm.server.rpc.door.calls import TooManyCalls
from etfarm.server.rpc.door.connections import MAX_STREAMS
from etfarm.wire.channel import CLIENT_OPTIONS
from etfarm.wire.shielding import end_tasks

log = structlog.get_logger()

WAIT_S: Final = 5.0
"""Time for which a call waits for a server that leads: longer than a new one needs after the former one was killed."""

_CALLS_OF_A_LINK: Final = MAX_STREAMS - 16
"""Number of calls after which another connection is opened: further ones would wait in gRPC for another call's end."""
_MOST_CALLS: Final = 64 * _CALLS_OF_A_LINK
"""Maximum number of calls that are forwarded or wait for a leader."""
_RETRY_MS: Final = 200

UNREAD: Final = [("grpc.http2.bdp_probe", 0)]
"""Options of a standby's connections in both directions. On fast links, gRPC would otherwise receive megabytes of each call
before they are read; a message that is read gets enough room without that."""


class Link:
    """One connection to the leader."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.is_closed = False
        """Whether the server at its other end no longer leads."""


class Links:
    """The connections to the current leader. They are opened when needed, and closed when another server leads.

    Args:
        leadership: says who leads.
        identity: this server's certificate chain and key, with which it connects; None without TLS.
        wait_s: time for which a call waits for a leader, and one of an unknown caller for its answer.
    """

    def __init__(self, leadership: Leadership, identity: tuple[bytes, bytes] | None, wait_s: float = WAIT_S) -> None:
        self._leadership = leadership
        self._identity = identity
        self.wait_s = wait_s
        self._links: list[Link] = []
        self._leader: Leader | None = None
        self._calls = 0
        self._closing: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def can_forward(self) -> bool:
        """Whether there is a leader, and it answered the last call."""
        return self._leadership.can_forward

    @asynccontextmanager
    async def take(self) -> AsyncIterator[tuple[Link, Leader]]:
        """Hold a place on a connection to the leader, which answers; wait for one for a bounded time.

        Raises:
            NoLeader: no server leads, or the one that leads does not answer.
            TooManyCalls: as many calls as possible are forwarded.
        """
        if self._calls >= _MOST_CALLS:
            raise TooManyCalls(
                f"This server forwards {_MOST_CALLS} calls, which is the limit.", "Use another one.", limit=_MOST_CALLS
            )
        self._calls += 1
        try:
            link, leader = await self._ready()
            try:
                yield link, leader
            finally:
                link.calls -= 1
        finally:
            self._calls -= 1

    async def _ready(self) -> tuple[Link, Leader]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.wait_s):
                while not self._ended.is_set():
                    leader = self._leadership.leader
                    self._follow(leader)
                    if leader is None:
                        await self._first(self._leadership.changed())
                        continue
                    link = self._reserve(leader)
                    try:
                        if await self._connected(link):
                            self._leadership.reach(is_reached=True)
                            return link, leader
                    except BaseException:
                        link.calls -= 1
                        raise
                    link.calls -= 1
        self._leadership.reach(is_reached=False)
        raise self._no_leader()

    async def _connected(self, link: Link) -> bool:
        """Wait until the connection is open; return False if another server leads in the meantime."""
        while (state := link.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if link.is_closed or state is grpc.ChannelConnectivity.SHUTDOWN or self._ended.is_set():
                return False
            await self._first(link.channel.wait_for_state_change(state), self._leadership.changed())
            self._follow(self._leadership.leader)
        return not link.is_closed

    async def _first(self, *waits: object) -> None:
        """Wait for the first of several things, or for the end of the connections."""
        tasks = [asyncio.ensure_future(wait) for wait in (*waits, self._ended.wait())]  # type: ignore[call-overload]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*tasks)

    def _follow(self, leader: Leader | None) -> None:
        """Close connections to a server that no longer leads."""
        former, self._leader = self._leader, leader
        if former is not None and leader is not None and former.token == leader.token:
            return  # at most its certificate is new
        for link in self._links:
            self._close(link)
        self._links = []

    def _reserve(self, leader: Leader) -> Link:
        link = next((link for link in self._links if link.calls < _CALLS_OF_A_LINK), None)
        if link is None:
            link = Link(self._open(leader))
            self._links.append(link)
        link.calls += 1
        return link

    def _open(self, leader: Leader) -> grpc.aio.Channel:
        options: list[tuple[str, int | str]] = [
            *CLIENT_OPTIONS, *UNREAD, ("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", _RETRY_MS),
            ("grpc.initial_reconnect_backoff_ms", _RETRY_MS),
        ]  # fmt: skip
        if not leader.certificate:
            return grpc.aio.insecure_channel(leader.address, options=options)
        chain, key = self._identity or (None, None)
        # The database names the certificate, so no other authority needs to be trusted.
        credentials = grpc.ssl_channel_credentials(leader.certificate.encode(), key, chain)
        return grpc.aio.secure_channel(leader.address, credentials, options=options)

    def _close(self, link: Link) -> None:
        link.is_closed = True
        task = asyncio.ensure_future(link.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _no_leader(self) -> NoLeader:
        leader = self._leadership.leader
        if leader is None:
            return NoLeader("No server of the farm leads at the moment.", "Try again; another one takes over within seconds.")
        return NoLeader(
            f"The server at {leader.address}, which leads the farm, does not answer.",
            "Try again. If this lasts, check that the farm's servers reach each other at what --advertise says.",
            address=leader.address,
        )  # fmt: skip

    async def close(self) -> None:
        """End what waits, and close the connections."""
        self._ended.set()
        for link in self._links:
            self._close(link)
        self._links = []
        await asyncio.gather(*self._closing, return_exceptions=True)
