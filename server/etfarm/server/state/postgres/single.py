"""A connection of a command that works on a database by itself, with transactions that may take long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import Connection

from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.postgres.connections import Connections, driver_of, is_lost
from etfarm.server.state.postgres.failures import DRIVER_ERRORS, lost, translated
from etfarm.server.state.postgres.liveness import WhileAlive

_STATEMENT_MS: Final = 3_600_000
"""Time limit of one statement, such as the count of a large table's rows."""
_IDLE_MS: Final = 86_400_000
"""Time for which a transaction may wait for its command, which compares all rows of the copy before it ends the source's."""


@contextmanager
def connected(url: DatabaseUrl, wait_s: float) -> Iterator[Connection]:
    """Connect for the time of the context. Each transaction is one snapshot.

    Raises:
        DATABASE_UNUSABLE, DatabaseUnavailable: the server refuses the connection, cannot be reached, or has gone away.
    """
    connections = Connections(url, wait_s)
    try:
        connection = connections.connect(time.monotonic() + wait_s)
        driver = driver_of(connection)
        driver.limit = WhileAlive(driver, connections.parameters)
        connection.execution_options(isolation_level="REPEATABLE READ")
        try:
            with connection.begin():
                connection.exec_driver_sql(f"SET statement_timeout = {_STATEMENT_MS}")
                connection.exec_driver_sql(f"SET idle_in_transaction_session_timeout = {_IDLE_MS}")
            yield connection
        except DRIVER_ERRORS as error:
            raise (lost(url, error) if is_lost(connection, error) else translated(url, error)) from error
        finally:
            connections.discard(connection)
    finally:
        connections.close()
