"""This server as one of the farm's: it follows who leads, takes the lease once it has expired, and renews it while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import psycopg
import structlog

from etfarm.server.cluster import lease
from etfarm.server.cluster.leadership import Leader, Leadership
from etfarm.server.cluster.lease import Fence, ServerRow, Session
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.postgres.bounded import BoundedAsyncConnection
from etfarm.server.state.postgres.connections import read_url
from etfarm.server.state.postgres.failures import refused
from etfarm.wire.errors import error_for

log = structlog.get_logger()

_MARGIN_S: Final = 0.05
"""Time after the expiry of a lease at which another server looks again."""
_RETRY_S: Final = 0.2
_MOST_WAIT_S: Final = 5.0
"""Longest time without a look at the lease: a notification may have been lost."""
_LOG_AGAIN_S: Final = 10.0
_CLOSE_S: Final = 3.0
_ALONE_S: Final = 1e6
"""Time since the expiry of its lease in which a server that is alone renews it."""
CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": 2, "tcp_user_timeout": 3000, "keepalives_idle": 1, "keepalives_interval": 1, "keepalives_count": 3,
    "application_name": "etfarm lease", "target_session_attrs": "read-write",
}  # fmt: skip


def answer_s() -> float:
    """Return the time after which another connection is tried. Statements wait for locks for less."""
    return lease.LEASE_S + lease.LATE_S


class Member:
    """This server among the servers of its farm.

    Args:
        url: the database.
        version: this server's version.
        certificate: returns this server's certificate chain in PEM; empty without TLS.
        blobs: identifies where this server's blobs are.
        revisions: the revisions of the database that this server knows.
        suspects: the jobs that the death of this server's former process counts for, each with the count beyond which it does
            not count.
        on_counted: called once the database has the counts of these jobs.
        asks_for_tokens: whether this server has a token file of its own.
    """

    def __init__(
        self,
        url: DatabaseUrl,
        version: str,
        certificate: Callable[[], str],
        blobs: str,
        revisions: Collection[str],
        suspects: Mapping[str, int] | None = None,
        *,
        on_counted: Callable[[], None] = lambda: None,
        asks_for_tokens: bool = False,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.address = ""
        """The address at which other servers reach this one, once it has joined."""
        self.leadership = Leadership()
        self.servers: list[ServerRow] = []
        """The farm's servers; known to the one that leads."""
        self.leaderless_s = 0.0
        """Time for which no server led, as far as this one has seen."""
        self.lost = asyncio.Event()
        """Set once this server has led and does so no longer: it must start anew."""
        self._url = url
        self._version = version
        self._certificate = certificate
        self._blobs = blobs
        self._revisions = frozenset(revisions)
        self._suspects = suspects or {}
        self._on_counted = on_counted
        self._asks_for_tokens = asks_for_tokens
        self._term: asyncio.Future[Leader] = asyncio.get_running_loop().create_future()
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._expiry: asyncio.TimerHandle | None = None
        self._leaderless_since: float | None = time.monotonic()
        self._applies = asyncio.Event()
        self._is_too_old = False
        self._has_failed = False
        """Whether this server ends because of an error: its lease expires, so that the next one knows."""

    @asynccontextmanager
    async def joined(self, address: str) -> AsyncIterator[Member]:
        """Take part until the end of the block, and give the lease up there if this server leads.

        Args:
            address: the address at which other servers reach this one.

        Raises:
            BadDatabaseUrl: the driver cannot read the database's URL.
            DATABASE_UNUSABLE: the database refuses this server.
            OTHER_BLOBS: this server's blobs are not those of the farm.
        """
        read_url(self._url)
        self.address = address
        task = asyncio.create_task(self._run(), name="lease")
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait({task, self._joined}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            yield self
        except BaseException:
            self._has_failed = True
            raise
        finally:
            task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_S)
            if self._expiry is not None:
                self._expiry.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self._joined.done():
            log.error("the farm's lease is no longer followed", exc_info=error)
            self._lose("because of a bug")

    def apply(self) -> None:
        """Take the lease from now on once it has expired. Until then this server only forwards calls."""
        self._applies.set()

    async def elected(self) -> Leader:
        """Wait until this server leads, and return it."""
        return await asyncio.shield(self._term)

    def fence(self) -> Fence:
        """Return the check of the leader's write transactions. Call it in the event loop, once this server leads."""
        loop = asyncio.get_running_loop()
        token = self._term.result().token
        return Fence(token, lambda: loop.call_soon_threadsafe(self._lose, "a write was refused"))

    def has_others(self) -> bool:
        """Return whether there are other servers, which can take the lead."""
        return any(server.id != self.id for server in self.servers)

    @property
    def is_leading(self) -> bool:
        """Whether this server leads."""
        return self._term.done() and not self._term.cancelled() and not self.lost.is_set()

    def measure_leaderless_s(self) -> float:
        """Return the time for which no server led, as far as this one has seen, in seconds."""
        since = self._leaderless_since
        return self.leaderless_s + (0.0 if since is None else time.monotonic() - since)

    async def _run(self) -> None:
        """Follow the lease, over as many connections to the database as necessary, until cancelled or the lease is lost."""
        logged_s = -_LOG_AGAIN_S
        while not self.lost.is_set():
            try:
                async with await BoundedAsyncConnection.connect(self._url.text, autocommit=True, **CONNECT) as session:
                    session.limit = answer_s
                    await self._take_part(session)
            except psycopg.Error as error:
                self.leadership.doubt()
                if not self._joined.done():
                    if (refusal := refused(self._url, error)) is not None:
                        raise refusal from None
                    self._joined.set_result(None)  # calls wait at the port meanwhile
                if time.monotonic() - logged_s > _LOG_AGAIN_S:
                    logged_s = time.monotonic()
                    log.warning("the farm's lease cannot be read or renewed; trying again", why=str(error).strip())
                await asyncio.sleep(_RETRY_S)

    async def _take_part(self, session: Session) -> None:
        await lease.create_tables(session)
        if self._blobs and (blobs := await lease.claim_blobs(session, self._blobs)) != self._blobs:
            raise error_for(
                "OTHER_BLOBS",
                f"The farm's blobs are at {blobs}, this server's at {self._blobs}.",
                "Give all servers of a farm the same --blobs, which all of them reach.",
                farm=blobs, here=self._blobs,
            )  # fmt: skip
        await session.execute(f"LISTEN {lease.CHANNEL}")
        try:
            # Before another server, or this one, takes the lead: it handles these jobs with care.
            await lease.count_death(session, self._suspects)
            self._suspects = {}
            self._on_counted()
            if not self._term.done():
                await self._stand_by(session)
            await self._lead(session)
        except asyncio.CancelledError:
            with contextlib.suppress(psycopg.Error):
                if self.is_leading and not self._has_failed:
                    await lease.release(session, self._term.result().token)
                await lease.leave(session, self.id)
            raise

    async def _stand_by(self, session: Session) -> None:
        """Follow the leader, and return once this server is it."""
        # A leader that knows of no other server would keep the lead when it cannot renew its lease.
        await lease.announce(session, self.id, self.address, self._version)
        await lease.notify(session)
        clock_s = asyncio.get_running_loop().time
        # A leader that this server has followed was without the database as well.
        spared_until_s = clock_s() + (lease.SPARE_S if self.leadership.leader is not None else 0.0)
        while True:
            await lease.announce(session, self.id, self.address, self._version)
            row = await lease.read(session)
            leader = row.leader(lease.LATE_S if clock_s() < spared_until_s else 0.0)
            # An earlier process with this server's own address has ended, and calls to it would come back here.
            self._publish(leader if row.address != self.address else None)
            if not self._joined.done():
                self._joined.set_result(None)
            if leader is None and self._applies.is_set() and await self._is_able(session):
                sent_s = clock_s()
                taken = await lease.take(
                    session, self.id, self.address, self._version, self._certificate(), asks_for_tokens=self._asks_for_tokens
                )
                if taken is not None:
                    self._begin(taken, sent_s)
                    return
            wait_s = _RETRY_S if row.remaining_s <= 0 else min(row.remaining_s + _MARGIN_S, _MOST_WAIT_S)
            async for _ in session.notifies(timeout=wait_s, stop_after=1):
                pass

    async def _is_able(self, session: Session) -> bool:
        """Return whether this server knows the database's tables and gets a connection to write them.

        It only forwards calls if a newer one has migrated them.
        """
        revision = await lease.revision(session)
        is_too_old = revision is not None and revision not in self._revisions
        if is_too_old and not self._is_too_old:
            log.warning("a newer version of etfarm has migrated the database: this server only forwards calls", revision=revision)
        self._is_too_old = is_too_old
        if is_too_old:
            return False
        # A leader without another connection would end, and the next one, too.
        async with await BoundedAsyncConnection.connect(self._url.text, **CONNECT):
            return True

    def _begin(self, leader: Leader, sent_s: float) -> None:
        log.info("this server leads the farm", token=leader.token, address=self.address)
        self._extend(sent_s)
        self._end_leaderless()
        self.leadership.set(None)  # calls wait until this server itself answers them
        self._term.set_result(leader)

    async def _lead(self, session: Session) -> None:
        """Renew the lease until it is lost."""
        token = self._term.result().token
        while not self.lost.is_set():
            sent_s = asyncio.get_running_loop().time()
            # A server that is alone renews its lease however long the database was away.
            late_s = lease.LATE_S if self.has_others() else _ALONE_S
            if not await lease.renew(session, token, self._certificate(), late_s=late_s):
                self._lose("another server has taken the lease")
                return
            self._extend(sent_s)
            await lease.announce(session, self.id, self.address, self._version)
            self.servers = await lease.list_servers(session)
            async for _ in session.notifies(timeout=lease.RENEWAL_S, stop_after=1):
                pass

    def _extend(self, sent_s: float) -> None:
        """Lead for as long as the lease may be renewed, counted from before the database was asked: never for longer."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_at(sent_s + lease.LEASE_S + lease.LATE_S, self._expire)

    def _expire(self) -> None:
        if self.has_others():
            # They have taken the lease, if only this server cannot reach the database.
            self._lose("the lease could not be renewed in time")
        else:
            # A database that restarts must not restart a server that is alone. If there is another one after all, it has taken
            # the lease, and the fence refuses this one's writes.
            log.warning("the lease could not be renewed in time; no other server is there to take it")

    def _lose(self, why: str) -> None:
        if not self.lost.is_set():
            log.error("this server no longer leads the farm", why=why)
            self._publish(None)
            self.lost.set()

    def _publish(self, leader: Leader | None) -> None:
        now = time.monotonic()
        if leader is None and self._leaderless_since is None:
            self._leaderless_since = now
        elif leader is not None:
            self._end_leaderless()
        self.leadership.set(leader)

    def _end_leaderless(self) -> None:
        if self._leaderless_since is not None:
            self.leaderless_s += time.monotonic() - self._leaderless_since
            self._leaderless_since = None
