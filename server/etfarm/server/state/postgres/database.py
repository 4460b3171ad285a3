"""A PostgreSQL database: one connection that writes, a few that read, and listeners with one each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import structlog
from sqlalchemy import Connection

from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import ConnectionCounts, Database, Notification
from etfarm.server.state.lane import Lane, NotBegun
from etfarm.server.state.postgres import backups, listening
from etfarm.server.state.postgres.connections import Connections
from etfarm.server.state.postgres.failures import WritesLost, unavailable
from etfarm.server.state.postgres.opening import open_tables
from etfarm.server.state.postgres.readers import Readers
from etfarm.server.state.postgres.writer import Writer

log = structlog.get_logger()

T = TypeVar("T")

_SHARED: Final = 100
"""Maximum number of writes that share a transaction."""


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
        listening.notify(connection, self._transactor.id, channel, payload)

    def is_backed_up(self, connection: Connection) -> bool:
        return backups.is_running(connection)

    def listen(self, *channels: str) -> AbstractAsyncContextManager[AsyncIterator[Notification]]:
        return listening.listening(self._connections, self._transactor.id, channels)

    def stop_waiting(self) -> None:
        super().stop_waiting()
        self._connections.closing.set()

    def close(self) -> None:
        self.stop_waiting()
        self._writer.close()
        self._readers.close()
        self._connections.close()
