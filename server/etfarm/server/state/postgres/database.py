"""A PostgreSQL database: one connection that writes, a few that read, and listeners with one each."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg
import structlog
from psycopg import sql
from sqlalchemy import Connection, text

from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import ConnectionCounts, Database, Notification
from etfarm.server.state.lane import Lane, NotBegun
from etfarm.server.state.postgres import backups
from etfarm.server.state.postgres.bounded import BoundedAsyncConnection
from etfarm.server.state.postgres.connections import Connections, driver_of, execute, is_lost, pauses
from etfarm.server.state.postgres.failures import DRIVER_ERRORS, WritesLost, is_repeatable, one_line, translated, unavailable
from etfarm.server.state.postgres.opening import open_tables
from etfarm.server.state.postgres.writer import Writer

log = structlog.get_logger()

T = TypeVar("T")

_SHARED: Final = 100
"""Maximum number of writes that share a transaction."""
_MAX_BYTES: Final = 7_000
"""Maximum size of a payload. PostgreSQL's own limit is 8,000 bytes."""

_PROBE_S: Final = 10.0
"""Interval at which a quiet connection is tried."""

_NOTIFY: Final = text("SELECT pg_notify(:channel, :payload)")
_COUNT: Final = 4
"""Maximum number of connections that read at the same time."""

_BEGIN: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class PostgresDatabase(Database):
    """A database of a PostgreSQL server, which several etfarm servers may share.

    Args:
        data: the data folder, where migrations store files.
        limit_s: how long work waits for a database server that is unavailable.
    """

    def __init__(self, url: DatabaseUrl, data: Path, limit_s: float) -> None:
        super().__init__()
        self._url = url
        self._data = data
        self._loss: WritesLost | None = None
        self._connections = Connections(url, limit_s)
        self._transactor = Writer(self._connections, lambda: self.guard)
        self._writer = Lane(self._transactor, "db-writer", most=_SHARED)
        self._readers = Readers(self._connections)

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def connections(self) -> ConnectionCounts:
        return self._connections.tally.counts()

    async def open(self) -> None:
        do = partial(open_tables, url=self._url, data=self._data)
        await asyncio.get_running_loop().run_in_executor(self._writer.thread, self._transactor.open, do)

    async def _write(self, do: Callable[[Connection], T], *, durable: bool) -> T:
        if self._loss is not None:
            # What the server has in memory is no longer what the database has.
            raise self._loss
        try:
            return await self._writer.run(do, durable=durable, wait_s=self._connections.limit_s)
        except NotBegun:
            raise unavailable(
                self._url, TimeoutError("other work is waiting for its answer"), self._connections.limit_s
            ) from None
        except WritesLost as error:
            if self._loss is None:
                self._loss = error
                log.error("the database has lost writes", database=str(self._url))
                self.on_damaged(error)
            raise

    async def _read(self, do: Callable[[Connection], T], *, is_single: bool) -> T:
        return await self._readers.run(do, is_single=is_single)

    def notify(self, connection: Connection, channel: str, payload: str) -> None:
        notify(connection, self._transactor.id, channel, payload)

    def is_backed_up(self, connection: Connection) -> bool:
        return backups.is_running(connection)

    def listen(self, *channels: str) -> AbstractAsyncContextManager[AsyncIterator[Notification]]:
        return listening(self._connections, self._transactor.id, channels)

    def stop_waiting(self) -> None:
        super().stop_waiting()
        self._connections.closing.set()

    def close(self) -> None:
        self.stop_waiting()
        self._writer.close()
        self._readers.close()
        self._connections.close()


def notify(connection: Connection, sender: str, channel: str, payload: str) -> None:
    """Notify the listeners of other processes when the transaction is committed."""
    if len(payload.encode()) > _MAX_BYTES:
        raise ValueError(f"a payload may have {_MAX_BYTES} bytes, got {len(payload.encode())}")
    connection.execute(_NOTIFY, {"channel": channel, "payload": f"{sender} {payload}"})


@asynccontextmanager
async def listening(connections: Connections, sender: str, channels: Sequence[str]) -> AsyncIterator[AsyncIterator[Notification]]:
    """Listen on a connection of its own, which is opened again when it breaks."""
    async with aclosing(_notifications(connections, sender, channels)) as notifications:
        yield notifications


async def _notifications(connections: Connections, sender: str, channels: Sequence[str]) -> Any:
    retry = pauses()
    while True:
        try:
            async with await BoundedAsyncConnection.connect(**connections.parameters, autocommit=True) as connection:
                connection.limit = lambda: _PROBE_S
                for channel in channels:
                    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                retry = pauses()
                for channel in channels:
                    yield Notification(channel)
                while True:
                    async for notice in connection.notifies(timeout=_PROBE_S):
                        origin, _, payload = notice.payload.partition(" ")
                        if origin != sender:
                            yield Notification(notice.channel, payload)
                    await connection.execute("SELECT 1")
        except (psycopg.Error, OSError) as error:
            log.warning("the listener has lost its connection to the database", error=one_line(error))
        await asyncio.sleep(next(retry))


class Readers:
    """Threads that run functions on snapshots."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._threads = ThreadPoolExecutor(_COUNT, thread_name_prefix="db-reader")
        self._idle: deque[Connection] = deque()

    async def run(self, do: Callable[[Connection], T], *, is_single: bool) -> T:
        """Run `do` on a snapshot, and return its result. If the connection breaks, it runs again on another one.

        Args:
            is_single: whether it executes one statement, which needs no transaction.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, do, is_single, time.monotonic())

    def _run(self, do: Callable[[Connection], T], is_single: bool, since_s: float) -> T:
        until_s = since_s + self._connections.limit_s
        for pause_s in pauses():
            connection = self._take(until_s)
            try:
                if not is_single:
                    execute(driver_of(connection), _BEGIN)
                result = do(connection)
                connection.commit()  # after a rollback, the driver would prepare its statements anew
            except StopIteration as error:
                self._give_back(connection, error)
                raise RuntimeError("the function raised StopIteration") from None  # which a future refuses
            except DRIVER_ERRORS as error:
                is_broken = is_lost(connection, error)
                self._give_back(connection, error)
                if not is_broken and not is_repeatable(error):
                    raise translated(self._connections.url, error) from error.__cause__
                if is_broken:
                    self._discard_idle()  # they are broken too, most likely
                self._connections.wait(pause_s, until_s, error)
            except BaseException as error:
                self._give_back(connection, error)
                raise
            else:
                self._idle.append(connection)
                return result
        raise AssertionError

    def _take(self, until_s: float) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connections.connect(until_s)

    def _give_back(self, connection: Connection, error: BaseException) -> None:
        """Keep a connection after a failure, if it still works."""
        if is_lost(connection, error):
            self._connections.discard(connection, is_lost=True)
            return
        driver_of(connection).rollback()
        connection.rollback()
        self._idle.append(connection)

    def close(self) -> None:
        """End the threads after their queued work."""
        self._threads.shutdown()
        self._discard_idle()

    def _discard_idle(self) -> None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            self._connections.discard(connection)
