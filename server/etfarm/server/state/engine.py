"""The database of a server, whichever engine it has: work is passed as functions of a connection."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeVar

import structlog
from sqlalchemy import Connection, Executable, Row

from etfarm.wire.errors import FarmError, Kind

log = structlog.get_logger()

T = TypeVar("T")

_RETRY_S: Final = 1.0
"""Pause between attempts to write to a full disk or to a database that is unavailable."""


class DatabaseFull(FarmError):
    """A disk without enough space for a change."""

    reason = "DISK_FULL"
    kind = Kind.RESOURCE_EXHAUSTED


class DatabaseUnavailable(FarmError):
    """A database server that cannot be reached, or does not answer in time. What was asked for is not done."""

    reason = "DATABASE_UNAVAILABLE"
    kind = Kind.UNAVAILABLE


class QueryTooSlow(DatabaseUnavailable):
    """A query that the database server has cancelled for taking too long. Another attempt would end the same way."""


@dataclass(frozen=True)
class Notification:
    """What another process notified, or, without a payload, that notifications may have been missed until now."""

    channel: str
    payload: str | None = None
    """The payload; None after each (re)connection: read what the channel is about again."""


class Guard(Protocol):
    """A condition of every transaction that writes."""

    @property
    def statement(self) -> str:
        """A query of one row without parameters, whose first column is true if the transaction is permitted."""

    def refuse(self) -> NoReturn:
        """Raise the error of a transaction that is not permitted."""


@dataclass(frozen=True)
class ConnectionCounts:
    """What a database's connections to its server have done since this process started."""

    open: int
    opened: int
    lost: int
    """Number of connections that broke."""
    round_trips: int
    unavailable_s: float
    """Time for which the server accepted no connection."""


class Database(ABC):
    """A database. Work is passed as functions of a connection, each of which runs in its own transaction.

    A function that writes may run several times, if the connection breaks: it must not change anything but the database.
    """

    def __init__(self) -> None:
        self.on_damaged: Callable[[FarmError], None] = lambda error: None
        """Called on the event loop if nothing can be written any more, with the error that the server should exit with."""
        self._is_ending = False
        self.guard: Guard | None = None
        """Asked at the start of each transaction of `write`, in its thread. If it refuses, nothing of the transaction is done,
        and the error is that of all functions that share it. No other process writes until the end of the transaction."""
        self.on_transaction: Callable[[str, float], None] = lambda kind, seconds: None
        """Called on the event loop at the end of each `read` and `write` with that name and its duration, waiting included."""

    @property
    @abstractmethod
    def is_shared(self) -> bool:
        """Whether other processes may write to the database meanwhile."""

    @property
    def connections(self) -> ConnectionCounts | None:
        """The connections to the database's server; None without one."""
        return None

    @abstractmethod
    async def open(self) -> None:
        """Check the database, then create or migrate the tables.

        Raises:
            DATABASE_UNUSABLE, DatabaseDamaged, DATABASE_FOREIGN, DATABASE_TOO_NEW: the database cannot be used.
            DatabaseUnavailable: its server does not answer.
            DatabaseFull: the disk has no space for the tables. The database is unchanged.
        """

    async def write(self, do: Callable[[Connection], T], *, durable: bool = False) -> T:
        """Run `do` in a transaction, in order with all other writes, and return its result.

        Writes that wait for others share a transaction: then the disk is waited for once. A failed one leaves nothing.

        Args:
            durable: whether to wait for the disk, so that the change survives a power failure (about 8 ms instead of 0.2 ms).

        Raises:
            DatabaseUnavailable: the database server was unavailable for too long. Nothing is done.
        """
        return await self._measure("write", lambda: self._write(do, durable=durable))

    async def read(self, do: Callable[[Connection], T]) -> T:
        """Run `do` on a snapshot that includes every completed write, and return its result.

        Raises:
            DatabaseUnavailable: the database server was unavailable for too long, or a query took too long.
        """
        return await self._measure("read", lambda: self._read(do, is_single=False))

    async def query(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Sequence[Row[Any]]:
        """Return the rows of one statement, as `read` would.

        A statement is a snapshot by itself: over a network, this saves `read` the beginning and the end of a transaction.
        """
        return await self._measure("read", lambda: self._read(lambda c: c.execute(statement, parameters).all(), is_single=True))

    async def _measure(self, kind: str, work: Callable[[], Awaitable[T]]) -> T:
        began_s = time.monotonic()
        try:
            while True:
                try:
                    return await work()
                except QueryTooSlow:
                    raise
                except DatabaseUnavailable as error:
                    if self._is_ending or not _is_patient.get():
                        raise
                    log.warning("the database is unavailable; waiting", error=error.message)
                await asyncio.sleep(_RETRY_S)
        finally:
            self.on_transaction(kind, time.monotonic() - began_s)

    @abstractmethod
    async def _write(self, do: Callable[[Connection], T], *, durable: bool) -> T: ...

    @abstractmethod
    async def _read(self, do: Callable[[Connection], T], *, is_single: bool) -> T: ...

    @abstractmethod
    def notify(self, connection: Connection, channel: str, payload: str) -> None:
        """Notify the listeners of other processes once the transaction of `connection` is committed.

        Args:
            connection: that of a function that writes.
            channel: an identifier.
            payload: at most 7,000 bytes.
        """

    @abstractmethod
    def listen(self, *channels: str) -> AbstractAsyncContextManager[AsyncIterator[Notification]]:
        """Listen, for the time of the context, to what other processes notify.

        The iterator begins with a notification without a payload for each channel, and has them again whenever the connection
        was lost meanwhile. It ends only with the context.
        """

    def stop_waiting(self) -> None:
        """Let nothing wait any longer for a database that is unavailable, since the server ends."""
        self._is_ending = True

    @abstractmethod
    def is_backed_up(self, connection: Connection) -> bool:
        """Return whether a backup is being made, perhaps on another machine. Until it has ended, no artifact may be deleted.

        Args:
            connection: that of a function that writes.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the threads after their queued work."""


_is_patient: ContextVar[bool] = ContextVar("is_patient", default=False)


def wait_without_limit() -> None:
    """Let reads and writes of the current task wait for a database that is unavailable for as long as it takes."""
    _is_patient.set(True)


async def retry_until_written(work: Callable[[], Awaitable[T]]) -> T:
    """Await `work`, and repeat it while the disk is full or the database unavailable; for data that must not be lost.

    To stop, cancel the task.
    """
    while True:
        try:
            return await work()
        except FarmError as error:
            if error.reason not in (DatabaseFull.reason, DatabaseUnavailable.reason):
                raise
            log.warning("nothing can be written, trying again", error=error.message, seconds=_RETRY_S)
        await asyncio.sleep(_RETRY_S)
