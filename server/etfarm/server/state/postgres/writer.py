"""The connection that writes: one transaction at a time among all servers, each done exactly once."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

import psycopg
import structlog
from psycopg import pq
from sqlalchemy import Connection

from etfarm.server.state.engine import DatabaseUnavailable, Guard
from etfarm.server.state.lane import SHARE_S, Outcome, Work
from etfarm.server.state.postgres.bounded import BoundedConnection
from etfarm.server.state.postgres.connections import Connections, driver_of, execute, is_lost, pauses
from etfarm.server.state.postgres.failures import (
    DRIVER_ERRORS,
    WritesLost,
    is_loss,
    is_repeatable,
    is_standby,
    lost,
    one_line,
    translated,
    unavailable,
)
from etfarm.server.state.postgres.liveness import WhileAlive

log = structlog.get_logger()

_LOCK: Final = 0x65746661726D
"""The advisory lock of the transactions that write. As on SQLite, there is one writer at a time: what a transaction reads does
not change until its end, and one that a server's death interrupts has ended when the next one begins."""

_LOWERABLE: Final = ("on", "local")
"""Values of synchronous_commit that etfarm lowers for what need not be durable. Who sets remote_apply wants it for everything."""

_LIMITS: Final = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
"""Time limits that do not hold for migrations."""

LOCK_STATEMENT: Final = f"SELECT pg_advisory_xact_lock({_LOCK})"


class _InSharedTransaction(Exception):
    """A function that failed in a transaction that others share, and that is undone."""


class _Unanswered(Exception):
    """A commit whose connection broke before its answer."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__()
        self.outcomes = outcomes


class Writer:
    """The transactor of the writing lane.

    Args:
        guard: returns the condition of transactions; None without one.
    """

    def __init__(self, connections: Connections, guard: Callable[[], Guard | None]) -> None:
        self._connections = connections
        self._guard = guard
        self._connection: Connection | None = None
        self._is_lowerable = True
        self.id = uuid.uuid4().hex
        self._number = 0
        """The number of the last transaction."""
        self._committed = 0
        """The number of the last one that is known to be committed."""
        self._is_registered = self._is_verified = False

    def transact(self, batch: Sequence[Work]) -> list[Outcome]:
        until_s, is_shared = batch[0].since_s + self._connections.limit_s, len(batch) > 1
        for pause_s in pauses():
            try:
                connection = self._connect(until_s)
                return self._attempt(connection, batch, with_savepoints=len(batch) > 1 and not is_shared)
            except _InSharedTransaction:
                is_shared = False
            except _Unanswered as commit:
                if self._was_committed():
                    return commit.outcomes
            except DatabaseUnavailable as error:
                expired = sum(work.since_s + self._connections.limit_s <= time.monotonic() for work in batch)
                return [Outcome(error=error)] * (len(batch) if self._connections.closing.is_set() else max(1, expired))
            except DRIVER_ERRORS as error:
                if self._connection is not None and (is_lost(self._connection, error) or is_standby(error)):
                    log.warning("the connection to the database is lost", error=one_line(error))
                    self._disconnect()
                elif not is_repeatable(error):
                    raise translated(self._connections.url, error) from error.__cause__
                if time.monotonic() > until_s or self._connections.closing.wait(pause_s):
                    limit_s = None if self._connections.closing.is_set() else self._connections.limit_s
                    return [Outcome(error=unavailable(self._connections.url, error, limit_s))]
        raise AssertionError

    def open(self, do: Callable[[Connection], None]) -> None:
        """Connect, and run a function in a transaction that may take as long as the server is alive; its errors are final."""
        self._connection = self._connections.connect(time.monotonic() + self._connections.limit_s)
        driver = driver_of(self._connection)
        driver.limit, limit = WhileAlive(driver, self._connections.parameters), driver.limit
        try:
            execute(driver, "BEGIN", *(f"SET LOCAL {each} TO 0" for each in _LIMITS), LOCK_STATEMENT)
            with self._connection.begin():
                do(self._connection)
        except DRIVER_ERRORS as error:
            if is_lost(self._connection, error):
                raise lost(self._connections.url, error) from error
            raise translated(self._connections.url, error) from error.__cause__
        finally:
            driver.limit = limit

    def _attempt(self, connection: Connection, batch: Sequence[Work], *, with_savepoints: bool) -> list[Outcome]:
        """Run functions in one transaction."""
        driver = driver_of(connection)
        guard = self._guard()
        is_permitted = self._begin(driver, guard, durable=any(work.durable for work in batch))
        transaction = connection.begin()
        try:
            if guard is not None and not is_permitted:
                guard.refuse()
            outcomes = self._run(connection, batch, with_savepoints=with_savepoints)
            if driver.info.transaction_status != pq.TransactionStatus.INTRANS:
                raise RuntimeError("a function has gone on after an error of the database, which undid the transaction")
        except BaseException as error:
            if not is_lost(connection, error):
                transaction.rollback()
            raise
        try:
            transaction.commit()
        except Exception as error:
            if is_lost(connection, error):
                raise _Unanswered(outcomes) from error
            driver.rollback()
            raise
        self._committed = self._number
        return outcomes

    def _begin(self, driver: BoundedConnection, guard: Guard | None, *, durable: bool) -> bool:
        """Begin a transaction in one round trip, number it, and return whether the guard permits it."""
        self._number += 1
        lower = [] if durable or not self._is_lowerable else ["SET LOCAL synchronous_commit TO off"]
        number = f"UPDATE commits SET number = {self._number}, at = timezone('utc', now()) WHERE writer = '{self.id}'"
        try:
            result = execute(driver, "BEGIN", *lower, LOCK_STATEMENT, number, *([guard.statement] if guard else []))
            return guard is None or result.get_value(0, 0) == b"t"
        except psycopg.Error as error:
            if not is_loss(error):
                driver.rollback()
            raise

    def _run(self, connection: Connection, batch: Sequence[Work], *, with_savepoints: bool) -> list[Outcome]:
        if len(batch) == 1:
            return [Outcome(batch[0].do(connection))]
        outcomes, began_s = list[Outcome](), time.monotonic()
        for work in batch:
            outcomes.append(self._run_one(connection, work, with_savepoint=with_savepoints))
            if time.monotonic() - began_s > SHARE_S:
                break
        return outcomes

    def _run_one(self, connection: Connection, work: Work, *, with_savepoint: bool) -> Outcome:
        """Run one of several functions.

        Its failure is its own only after a savepoint, which costs as much as a statement: so the functions run without, and again
        with savepoints if one fails.
        """
        driver = driver_of(connection)
        if with_savepoint:
            execute(driver, "SAVEPOINT work")
        try:
            outcome = Outcome(work.do(connection))
            if with_savepoint:
                execute(driver, "RELEASE work")
            return outcome
        except Exception as error:
            if is_lost(connection, error) or is_repeatable(error) or is_standby(error):
                raise
            if not with_savepoint:
                raise _InSharedTransaction from error
            execute(driver, "ROLLBACK TO work", "RELEASE work")
            return Outcome(error=translated(self._connections.url, error))

    def _connect(self, until_s: float | None) -> Connection:
        """Return the connection; one that is new knows that the database has every confirmed write.

        Raises:
            WritesLost: the database does not have them.
        """
        if self._connection is None:
            self._connection, self._is_verified = self._connections.connect(until_s), False
        if not self._is_verified:
            driver = driver_of(self._connection)
            try:
                self._verify(driver)
            except psycopg.Error as error:
                if not is_loss(error):
                    driver.rollback()
                raise
            self._is_verified = True
        return self._connection

    def _verify(self, driver: BoundedConnection) -> None:
        """Read the number of the last commit, once no transaction of an earlier connection is left."""
        if not self._is_registered:
            forget = "DELETE FROM commits WHERE at < timezone('utc', now()) - interval '30 days'"
            register = f"INSERT INTO commits VALUES ('{self.id}', 0) ON CONFLICT DO NOTHING"  # the answer may have been lost
            execute(driver, "BEGIN", LOCK_STATEMENT, forget, register, "COMMIT")
            self._is_registered = True
        execute(driver, "BEGIN", LOCK_STATEMENT)
        query = "SELECT number, current_setting('synchronous_commit') FROM commits WHERE writer = %s"
        row = driver.execute(query, [self.id]).fetchone()
        execute(driver, "COMMIT")
        if row is None or row[0] < self._committed:
            raise WritesLost(self._connections.url)
        self._is_lowerable = row[1] in _LOWERABLE
        self._committed = row[0]

    def _was_committed(self) -> bool:
        """Return whether the last transaction is committed, whose answer was lost; wait for the database as long as it takes."""
        number = self._number
        log.warning("the connection broke during a commit; its outcome is looked up")
        self._disconnect()
        for pause_s in pauses():
            try:
                self._connect(None)
                return self._committed == number
            except DRIVER_ERRORS as error:
                self._disconnect()
                self._connections.wait(pause_s, None, error)
        raise AssertionError

    def _disconnect(self, *, is_lost: bool = True) -> None:
        if self._connection is not None:
            self._connections.discard(self._connection, is_lost=is_lost)
            self._connection = None

    def close(self) -> None:
        self._disconnect(is_lost=False)
