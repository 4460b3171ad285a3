"""Connections to a PostgreSQL server, each for the time that it lasts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import error_from_result
from sqlalchemy import Connection, create_engine
from sqlalchemy.pool import NullPool

from etfarm.server.state.database_url import BadDatabaseUrl, DatabaseUrl
from etfarm.server.state.postgres.failures import driver_error, is_loss, refused, unavailable

STATEMENT_S: Final = 60
"""Time limit of one statement."""
_IDLE_S: Final = 5
"""Time for which a transaction may wait for its server: then it ends, so that a frozen server does not hold up the others."""
_LOCK_S: Final = 10
"""Time limit of the wait for a lock: another server's transactions take milliseconds."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0

_DEFAULTS: Final[dict[str, Any]] = {
    "application_name": "etfarm",
    "connect_timeout": 5,
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
        limit_s: how long work waits for a server that is away.
    """

    def __init__(self, url: DatabaseUrl, limit_s: float) -> None:
        self.url = url
        self.limit_s = limit_s
        self.closing = Event()
        """Set when the database closes: nothing waits any longer."""
        self.parameters = _parameters(url)
        self._engine = create_engine("postgresql+psycopg://", poolclass=NullPool, creator=self._connect, use_native_hstore=False)

    def _connect(self) -> psycopg.Connection[Any]:
        # Transactions begin with statements of ours, which say more than BEGIN.
        # The same few statements run all the time: the server keeps their plans from the second time on.
        connection = psycopg.connect(**self.parameters, autocommit=True, prepare_threshold=1)
        connection.adapters.register_loader("numeric", _Whole)
        return connection

    def connect(self, until_s: float | None) -> Connection:
        """Return a new connection; wait for a server that is away.

        Args:
            until_s: when to give up, by the monotonic clock; None to wait until the database closes.

        Raises:
            DatabaseUnusable: the server refuses the role or the database.
            DatabaseUnavailable: the server was away until then.
        """
        for pause_s in pauses():
            try:
                return self._engine.connect()
            except Exception as error:
                if driver_error(error) is None:
                    raise
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
            raise unavailable(self.url, error, self.limit_s) from error

    def close(self) -> None:
        """Forget the engine's state."""
        self._engine.dispose()


def pauses() -> Iterator[float]:
    """Yield the pauses between attempts, in seconds."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def driver_of(connection: Connection) -> psycopg.Connection[Any]:
    """Return the driver's connection."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


def execute(driver: psycopg.Connection[Any], *statements: str) -> pq.abc.PGresult:
    """Execute statements without parameters in one round trip, and return the result of the last one."""
    result = driver.pgconn.exec_("; ".join(statements).encode())
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise error_from_result(result)
    return result


def is_lost(connection: Connection, error: BaseException) -> bool:
    """Return whether a connection cannot be used any more after an error.

    libpq notices a broken connection only when it reads, and not when it cannot write.
    """
    return is_loss(error) or connection.closed or connection.invalidated or driver_of(connection).closed


def discard(connection: Connection) -> None:
    """Close a connection, whatever its state is."""
    if not connection.closed and not connection.invalidated:
        driver_of(connection).close()
        connection.invalidate()
    connection.close()


def _parameters(url: DatabaseUrl) -> dict[str, Any]:
    try:
        of_url = conninfo_to_dict(url.text)
    except psycopg.ProgrammingError:
        # The driver's sentence may quote the password.
        raise BadDatabaseUrl("the driver cannot read it") from None
    options = (
        f"-c statement_timeout={STATEMENT_S}s -c idle_in_transaction_session_timeout={_IDLE_S}s -c lock_timeout={_LOCK_S}s "
        "-c timezone=UTC"
    )
    return {**_DEFAULTS, **of_url, "client_encoding": "utf8", "options": f"{options} {of_url.get('options') or ''}".strip()}
