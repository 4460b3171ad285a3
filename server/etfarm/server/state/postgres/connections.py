"""Connections to a PostgreSQL server, each for the time that it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from threading import Event, Lock
from typing import Any, Final

import psycopg
from psycopg import generators, pq
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import error_from_result
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.pool import NullPool

from etfarm.server.state.database_url import BadDatabaseUrl, DatabaseUrl
from etfarm.server.state.engine import ConnectionCounts
from etfarm.server.state.postgres.bounded import BoundedConnection
from etfarm.server.state.postgres.failures import driver_error, is_loss, refused, unavailable
from etfarm.wire.retry_backoff import retry_backoff

_STATEMENT_S: Final = 10.0, 60.0
"""Least and greatest time limit of one statement. Within them, it is the time for which work waits for the server."""
_MARGIN_S: Final = 5.0
"""Time beyond a statement's limit after which its server counts as hung."""
_CLOSING_S: Final = 5.0
"""Time limit of an answer while the database closes."""
_CONNECT_S: Final = 2, 5
"""Least and greatest time limit of an attempt to connect."""
_IDLE_S: Final = 5
"""Time for which a transaction may wait for its server: then it ends, so that a frozen server does not hold up the others."""
_LOCK_S: Final = 10
"""Time limit of the wait for a lock: another server's transactions take milliseconds."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.5

_DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "etfarm",
    # A server that does not accept writes is none to wait at: with several hosts, the next one is tried.
    "target_session_attrs": "read-write",
    # A peer whose machine is gone is noticed within about ten seconds.
    "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000,
}  # fmt: skip


class _Whole(Loader):
    """The sum of bigints is numeric in PostgreSQL; etfarm has no other numbers of that type."""

    def load(self, data: Any) -> int | float:
        text = bytes(data).decode()
        return float(text) if "." in text or text in ("NaN", "Infinity", "-Infinity") else int(text)


class Connections:
    """Opens connections, whose transactions the caller begins and ends with `execute`.

    Args:
        limit_s: how long work waits for a server that is unavailable or hangs.
    """

    def __init__(self, url: DatabaseUrl, limit_s: float) -> None:
        self.url = url
        self.limit_s = limit_s
        self.closing = Event()
        """Set when the database closes: nothing waits any longer."""
        self.tally = Tally()
        least_s, most_s = _STATEMENT_S
        self._statement_s = min(most_s, max(least_s, limit_s))
        self.parameters = _parameters(url, self._statement_s, max(_CONNECT_S[0], min(_CONNECT_S[1], round(limit_s))))
        self._engine = create_engine("postgresql+psycopg://", poolclass=NullPool, creator=self._connect, use_native_hstore=False)
        event.listen(self._engine, "do_executemany", _execute_few)

    def _connect(self) -> BoundedConnection:
        # Transactions begin with statements of ours, which say more than BEGIN.
        # The same few statements run all the time: the server keeps their plans from the second time on.
        connection = BoundedConnection.connect(**self.parameters, autocommit=True, prepare_threshold=1)
        connection.limit, connection.on_wait = self._answer_s, self.tally.add_round_trip
        connection.adapters.register_loader("numeric", _Whole)
        return connection

    def _answer_s(self) -> float:
        """Return the time after which an answer is overdue. The server itself ends a statement before."""
        return _CLOSING_S if self.closing.is_set() else self._statement_s + _MARGIN_S

    def connect(self, until_s: float | None) -> Connection:
        """Return a new connection; wait for a server that is unavailable.

        Args:
            until_s: when to give up, by the monotonic clock; None to wait until the database closes.

        Raises:
            DATABASE_UNUSABLE: the server refuses the role or the database.
            DatabaseUnavailable: the server was unavailable until then.
        """
        if until_s is not None and time.monotonic() > until_s:
            # It has waited behind other work, which the server did not answer.
            overdue = TimeoutError("it does not answer")
            raise unavailable(self.url, overdue, self.limit_s)
        for pause_s in pauses():
            try:
                connection = self._engine.connect()
                self.tally.on_opened()
                return connection
            except Exception as error:
                if driver_error(error) is None:
                    raise
                self.tally.on_refused()
                if until_s is not None and (known := refused(self.url, error)) is not None:
                    raise known from error
                self.wait(pause_s, until_s, error)
        raise AssertionError

    def wait(self, pause_s: float, until_s: float | None, error: BaseException) -> None:
        """Pause before another attempt.

        Raises:
            DatabaseUnavailable: there is no time for another one.
        """
        left_s = pause_s if until_s is None else min(pause_s, until_s - time.monotonic())
        if left_s <= 0 or self.closing.wait(left_s):
            raise unavailable(self.url, error, None if self.closing.is_set() else self.limit_s) from error

    def discard(self, connection: Connection, *, is_lost: bool = False) -> None:
        """Close a connection, whatever its state is."""
        self.tally.on_closed(is_lost=is_lost)
        if not connection.closed and not connection.invalidated:
            driver_of(connection).close()
            connection.invalidate()
        connection.close()

    def close(self) -> None:
        """Forget the engine's state."""
        self._engine.dispose()


def _execute_few(cursor: psycopg.Cursor[Any], statement: bytes, rows: Sequence[Any], _context: object) -> bool:
    """Execute a statement for one or two rows in a round trip each: the driver takes three for a list of any length."""
    is_short = len(rows) <= 2
    for row in rows if is_short else ():
        cursor.execute(statement, row)
    return is_short


def pauses() -> Iterator[float]:
    """Return the pauses between attempts, in seconds."""
    return retry_backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def driver_of(connection: Connection) -> BoundedConnection:
    """Return the driver's connection."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, BoundedConnection)
    return driver


def execute(driver: BoundedConnection, *statements: str) -> pq.abc.PGresult:
    """Execute statements without parameters in one round trip, and return the result of the last one."""
    # Every transaction begins with this: a cursor would take half as long again.
    driver.pgconn.send_query("; ".join(statements).encode())
    result: pq.abc.PGresult = driver.wait(generators.execute(driver.pgconn))[-1]
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise error_from_result(result)
    return result


def is_lost(connection: Connection, error: BaseException) -> bool:
    """Return whether a connection cannot be used any more after an error.

    libpq notices a broken connection only when it reads, and not when it cannot write.
    """
    return is_loss(error) or connection.closed or connection.invalidated or driver_of(connection).closed


def read_url(url: DatabaseUrl) -> dict[str, Any]:
    """Return a URL's parameters as the driver reads them.

    Raises:
        BadDatabaseUrl: it cannot read them.
    """
    try:
        return dict(conninfo_to_dict(url.text))
    except psycopg.ProgrammingError:
        # The driver's sentence may quote the password.
        raise BadDatabaseUrl("the driver cannot read it") from None


def _parameters(url: DatabaseUrl, statement_s: float, connect_s: int) -> dict[str, Any]:
    of_url = read_url(url)
    options = (
        f"-c statement_timeout={statement_s * 1e3:.0f} -c idle_in_transaction_session_timeout={_IDLE_S}s "
        f"-c lock_timeout={_LOCK_S}s -c timezone=UTC"
    )
    options = f"{options} {of_url.get('options') or ''}".strip()
    return {**_DEFAULTS, "connect_timeout": connect_s, **of_url, "client_encoding": "utf8", "options": options}


class Tally:
    """The counts of all connections of a database."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._open = self._opened = self._lost = self._round_trips = 0
        self._unavailable_s = 0.0
        self._unavailable_since_s: float | None = None

    def add_round_trip(self) -> None:
        """Count a message to the server that is answered."""
        with self._lock:
            self._round_trips += 1

    def on_opened(self) -> None:
        """Count a connection, with which the server is back."""
        with self._lock:
            self._open += 1
            self._opened += 1
            self._unavailable_s = self._measure_unavailable_s()
            self._unavailable_since_s = None

    def on_refused(self) -> None:
        """Count the time from now on until a connection opens."""
        with self._lock:
            if self._unavailable_since_s is None:
                self._unavailable_since_s = time.monotonic()

    def on_closed(self, *, is_lost: bool) -> None:
        """Count the end of a connection."""
        with self._lock:
            self._open -= 1
            self._lost += is_lost

    def counts(self) -> ConnectionCounts:
        """Return the counts until now."""
        with self._lock:
            return ConnectionCounts(self._open, self._opened, self._lost, self._round_trips, self._measure_unavailable_s())

    def _measure_unavailable_s(self) -> float:
        return self._unavailable_s + (0.0 if self._unavailable_since_s is None else time.monotonic() - self._unavailable_since_s)
