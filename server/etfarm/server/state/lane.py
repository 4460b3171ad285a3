"""The thread of a database connection. Where several functions wait for it, they share a transaction and thus a commit."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine

T = TypeVar("T")

_SHARE_S: Final = 0.005
"""Time after which further functions go into the next transaction, so that none waits long for the commit."""


@dataclass(frozen=True, eq=False)
class _Work:
    """A function that waits for the thread."""

    do: Callable[[Connection], Any]
    durable: bool
    result: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True)
class _Outcome:
    """What a function returned, or the error that it ended with."""

    value: Any = None
    error: BaseException | None = None


class Lane:
    """A thread with one connection.

    Args:
        translated: context manager that translates SQLite's errors.
        most: maximum number of functions that share a transaction.
        query_only: whether the connection refuses to write.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        translated: Callable[[], AbstractContextManager[None]],
        *,
        most: int = 1,
        query_only: bool = False,
    ) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._engine = engine
        self._translated = translated
        self._most = most
        self._query_only = query_only
        self._waiting: deque[_Work] = deque()
        self._is_called = False
        """Whether the thread will look for functions that wait."""
        self._connection: Connection | None = None
        self._is_durable: bool | None = None
        """Whether the connection's commits wait for the disk; None before the first."""

    async def run(self, do: Callable[[Connection], T], *, durable: bool = False) -> T:
        """Run `do` in a transaction, in order, and return its result once that is committed.

        A function that fails leaves nothing. An error that makes SQLite roll back the transaction, such as a full disk, is that
        of all functions that share it.

        Args:
            durable: whether the commit waits for the disk.
        """
        loop = asyncio.get_running_loop()
        work = _Work(do, durable, loop.create_future(), loop)
        self._waiting.append(work)
        if not self._is_called:
            self._is_called = True
            try:
                self.thread.submit(self._work_off)
            except RuntimeError:
                self._is_called = False  # closed: further work must be refused as well, not wait
                raise
        result: T = await work.result
        return result

    def close(self) -> None:
        """End the thread after the functions that wait for it."""
        self.thread.submit(self._disconnect).result()
        self.thread.shutdown()

    def _work_off(self) -> None:
        """Run all functions that wait, in as few transactions as possible."""
        # Before they are taken: a function that comes later has a call of its own.
        self._is_called = False
        while batch := self._take():
            try:
                outcomes = self._transact(batch)
            except BaseException as error:  # noqa: BLE001 - the callers' error
                outcomes = [_Outcome(error=error)] * len(batch)
            self._waiting.extendleft(reversed(batch[len(outcomes) :]))
            batch[0].loop.call_soon_threadsafe(_deliver, batch[: len(outcomes)], outcomes)

    def _take(self) -> list[_Work]:
        batch: list[_Work] = []
        while self._waiting and len(batch) < self._most:
            work = self._waiting.popleft()
            if not work.result.cancelled():
                batch.append(work)
        return batch

    def _transact(self, batch: list[_Work]) -> list[_Outcome]:
        """Run functions in one transaction; return the outcomes of those that it had time for, at least one."""
        with self._translated():
            connection, driver = self._connect(durable=any(work.durable for work in batch))
            began_s, outcomes = time.monotonic(), list[_Outcome]()
            if len(batch) == 1:
                with _transaction(connection, driver):
                    return [_Outcome(batch[0].do(connection))]
            with _transaction(connection, driver):
                for work in batch:
                    outcomes.append(self._attempt(work, connection, driver))
                    if time.monotonic() - began_s > _SHARE_S:
                        break
            return outcomes

    def _attempt(self, work: _Work, connection: Connection, driver: sqlite3.Connection) -> _Outcome:
        """Run one of several functions; undo what it has written if it fails."""
        driver.execute("SAVEPOINT work")
        try:
            with self._translated():
                outcome = _Outcome(work.do(connection))
        except Exception as error:
            if not driver.in_transaction:
                raise  # SQLite has undone the whole transaction
            driver.execute("ROLLBACK TO work")
            outcome = _Outcome(error=error)
        driver.execute("RELEASE work")
        return outcome

    def _connect(self, *, durable: bool) -> tuple[Connection, sqlite3.Connection]:
        """Return the connection, as SQLAlchemy's and as the driver's. Call it outside of transactions, which ignore pragmas."""
        if self._connection is None:
            self._connection = self._engine.connect()
            self._driver.execute(f"PRAGMA query_only={'ON' if self._query_only else 'OFF'}")
        if self._is_durable != durable:
            self._driver.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            self._is_durable = durable
        return self._connection, self._driver

    @property
    def _driver(self) -> sqlite3.Connection:
        assert self._connection is not None
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        return driver

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


@contextmanager
def _transaction(connection: Connection, driver: sqlite3.Connection) -> Iterator[None]:
    """Run the block in a transaction, and leave none open, whatever happens."""
    try:
        with connection.begin():
            yield
    finally:
        # SQLAlchemy rolls back after a block that fails, but not after a commit that does.
        if driver.in_transaction:
            driver.rollback()


def _deliver(batch: list[_Work], outcomes: list[_Outcome]) -> None:
    for work, outcome in zip(batch, outcomes, strict=True):
        if work.result.done():
            continue  # its caller was cancelled
        if outcome.error is None:
            work.result.set_result(outcome.value)
        elif isinstance(outcome.error, StopIteration):
            work.result.set_exception(RuntimeError("the function raised StopIteration"))  # which a future refuses
        else:
            work.result.set_exception(outcome.error)
