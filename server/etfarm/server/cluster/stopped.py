"""A farm of which no server runs: a command holds its lease, so that none takes the lead meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from etfarm.server.cluster import lease
from etfarm.server.cluster.errors import servers_running
from etfarm.server.cluster.lease import PRESENT_S
from etfarm.server.state.database_url import DatabaseUrl
from etfarm.server.state.engine import DatabaseUnavailable
from etfarm.server.state.postgres.bounded import BoundedConnection
from etfarm.server.state.postgres.connections import read_url
from etfarm.server.state.postgres.failures import one_line, refused
from etfarm.wire.errors import EtfarmError

_CONNECT: Final[dict[str, Any]] = {
    "connect_timeout": 5,
    "application_name": "etfarm command",
    "target_session_attrs": "read-write",
    "keepalives_idle": 30,
}
_SETTINGS: Final = "SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = 0"
ANSWER_S: Final = 30.0
"""Default time after which an answer is overdue: a database server that stands still keeps its connections open."""
_LOCK: Final = "SELECT address FROM etfarm_cluster.lease WHERE id = 1 FOR UPDATE"
"""Keeps the lease from being taken, as a write of a leader does that does not end."""
_RUNNING: Final = """
SELECT address FROM etfarm_cluster.servers WHERE seen_at > clock_timestamp() - make_interval(secs => %(present_s)s)
UNION ALL
SELECT address FROM etfarm_cluster.lease WHERE NOT released AND expires_at > clock_timestamp()
LIMIT 1
"""


class StoppedFarm:
    """The hold on the lease of a farm.

    Args:
        session: the connection whose transaction locks the lease.
    """

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        self._session = session

    def require_held(self) -> None:
        """Check that the lease was held until now.

        Raises:
            SERVERS_RUNNING: the connection broke, so that a server may have taken it.
        """
        with _held():
            self._session.execute("SELECT 1")

    def require_none_waits(self) -> None:
        """Check that the lease was held until now, and that no server waits for it, which has the former configuration.

        Raises:
            SERVERS_RUNNING: one does; or the connection broke, so that one may have taken the lease.
        """
        with _held():
            running = self._session.execute(_RUNNING, {"present_s": PRESENT_S}).fetchone()
        if running is not None:
            raise servers_running(f"A server of the farm was started meanwhile, at {running[0]}.")

    def name_blobs(self, blobs: str) -> None:
        """Record where the farm's blobs are from now on, so that a server with another configuration is refused.

        Args:
            blobs: what its servers claim, see `Member`; empty for what the next server claims.

        Raises:
            SERVERS_RUNNING: the connection broke, or a server has taken the lease.
        """
        with _held():
            self._session.execute("UPDATE etfarm_cluster.lease SET blobs = %s WHERE id = 1", [blobs])
            self._session.commit()  # which lets a server take the lease for an instant
            self._session.execute(_LOCK)
        self.require_none_waits()


@contextmanager
def _held() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise servers_running(f"The connection that kept servers from starting was lost: {one_line(error)}.") from error


@contextmanager
def stopped(url: DatabaseUrl, answer_s: float = ANSWER_S) -> Iterator[StoppedFarm]:
    """Require that no server of a farm runs, and let none lead until the end of the block.

    Args:
        answer_s: time after which an answer of the database is overdue.

    Raises:
        SERVERS_RUNNING: a server runs, or one that was killed was seen a few seconds ago.
        BadDatabaseUrl: the driver cannot read the URL.
        DATABASE_UNUSABLE, DatabaseUnavailable: the database refuses the connection, or cannot be reached.
    """
    read_url(url)
    try:
        session = BoundedConnection.connect(url.text, **_CONNECT)
    except psycopg.Error as error:
        raise _failure(url, error) from None
    session.limit = lambda: answer_s
    try:
        try:
            session.execute(_SETTINGS)
            # A database that no server has used yet has no lease: one that is started meanwhile would take a new one.
            session.execute(lease.creation())
            session.commit()
            _hold(session)
        except psycopg.Error as error:
            raise _failure(url, error) from None
        yield StoppedFarm(session)
    finally:
        session.close()


def _failure(url: DatabaseUrl, error: psycopg.Error) -> EtfarmError:
    what = f"The database {url} cannot be reached: {one_line(error)}."
    return refused(url, error) or DatabaseUnavailable(what, "Check its server and the URL.", url=url)


def _hold(session: psycopg.Connection[Any]) -> None:
    """Lock the lease until the end of the transaction."""
    try:
        session.execute(_LOCK)
    except psycopg.errors.LockNotAvailable:
        raise servers_running("A server of the farm is writing to its database, or another command works on it.") from None
    running = session.execute(_RUNNING, {"present_s": PRESENT_S}).fetchone()
    if running is not None:
        raise servers_running(f"A server of the farm runs at {running[0]}, or did so within the last {PRESENT_S:g} s.")
