"""The lease of the leading server: a row of the database, whose clock alone decides when it expires.

A leader renews its lease every second. If it cannot, the lease expires after three, and another server takes it with the next
token. Until one has, the leader may still renew it, for three more: a database that was away has given it to no other server.
Each write transaction of the leader checks its token on its own connection (`Fence`), so that a former leader that does not know
it yet, such as a process that stood still, writes nothing.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import psycopg
import structlog
from psycopg.rows import namedtuple_row

from etfarm.server.cluster.leadership import Leader
from etfarm.wire.errors import error_for

log = structlog.get_logger()

LEASE_S: Final = 3.0
"""Time for which a lease is valid without a renewal."""
RENEWAL_S: Final = 1.0
LATE_S: Final = 3.0
"""Time after the expiry of a lease in which its holder may still renew it, if no other server has taken it."""
SPARE_S: Final = 1.0
"""Time after the database was away in which other servers leave such a lease to its holder, which may be about to renew it."""
CHANNEL: Final = "etfarm_lease"
"""The channel on which changes of the leader and new servers are notified."""
PRESENT_S: Final = 10.0
"""Time for which a server counts as a member without having been seen."""

_TABLES_KEY: Final = 0x45_54_4C_45
_LOCK_MS: Final = 2000
"""Time limit of the wait for the row of the lease, which a write of a leader or a command may hold."""

# These tables are not migrated with the others, and have a schema of their own: servers of several versions use them at a time,
# before the lease decides which one may migrate. Columns are only ever added.
_TABLES: Final = """
CREATE SCHEMA IF NOT EXISTS etfarm_cluster;
CREATE TABLE IF NOT EXISTS etfarm_cluster.lease (
    id smallint PRIMARY KEY CHECK (id = 1),
    token bigint NOT NULL DEFAULT 0,
    holder text NOT NULL DEFAULT '',
    address text NOT NULL DEFAULT '',
    version text NOT NULL DEFAULT '',
    certificate text NOT NULL DEFAULT '',
    expires_at timestamptz NOT NULL DEFAULT to_timestamp(0),
    released boolean NOT NULL DEFAULT true,
    secret text NOT NULL,
    blobs text NOT NULL DEFAULT '',
    asks_for_tokens boolean NOT NULL DEFAULT false
);
CREATE TABLE IF NOT EXISTS etfarm_cluster.servers (
    id text PRIMARY KEY,
    address text NOT NULL,
    version text NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""
# The lock of a change waits for writes of the leader, and these for it, so that the table is changed only where it has to be.
_NEW_COLUMN: Final = f"""
DO $$ BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_attribute WHERE attrelid = 'etfarm_cluster.lease'::regclass AND attname = 'asks_for_tokens'
    ) THEN
        PERFORM set_config('lock_timeout', '{_LOCK_MS}', true);
        ALTER TABLE etfarm_cluster.lease ADD COLUMN asks_for_tokens boolean NOT NULL DEFAULT false;
    END IF;
END $$;
"""

_READ: Final = """
SELECT token, holder, address, version, certificate, secret, blobs, released,
       extract(epoch FROM expires_at - clock_timestamp())::float8 AS remaining_s
FROM etfarm_cluster.lease WHERE id = 1
"""
_READ_FOR_UPDATE: Final = _READ + "FOR UPDATE"
"""Waits for the end of writes that have checked the lease, unlike renewals, which change no key."""

_TAKE: Final = """
UPDATE etfarm_cluster.lease SET token = token + 1, holder = %(holder)s, address = %(address)s, version = %(version)s,
       certificate = %(certificate)s, expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s), released = false,
       asks_for_tokens = %(asks_for_tokens)s
WHERE id = 1 RETURNING token, secret
"""
_RENEW: Final = """
UPDATE etfarm_cluster.lease SET expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s), certificate = %(certificate)s
WHERE id = 1 AND token = %(token)s AND NOT released
      AND expires_at > clock_timestamp() - make_interval(secs => %(late_s)s) RETURNING 1
"""
_RELEASE: Final = """
UPDATE etfarm_cluster.lease SET expires_at = to_timestamp(0), released = true WHERE id = 1 AND token = %(token)s
"""
_END_WRITERS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = %(name)s AND pid <> pg_backend_pid()
"""
_SEEN: Final = """
INSERT INTO etfarm_cluster.servers (id, address, version) VALUES (%(id)s, %(address)s, %(version)s)
ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp(), address = excluded.address
"""
_SERVERS: Final = """
SELECT id, address, version, started_at FROM etfarm_cluster.servers
WHERE seen_at > clock_timestamp() - make_interval(secs => %(present_s)s) ORDER BY started_at, id
"""
_FORGET: Final = "DELETE FROM etfarm_cluster.servers WHERE seen_at < clock_timestamp() - make_interval(secs => %(present_s)s)"
_COUNT_DEATH: Final = """
UPDATE jobs SET takeups = takeups + 1 FROM unnest(%(jobs)s::text[], %(limits)s::int[]) AS suspects (job, most)
WHERE id = job AND finished_at IS NULL AND takeups < most
"""
"""As `etfarm.server.jobs.takeups.Takeups.count`. No fence refuses it: the server that has died need not lead again."""

Session = psycopg.AsyncConnection[Any]


@dataclass(frozen=True)
class LeaseRow:
    """The lease as the database has it."""

    token: int
    holder: str
    address: str
    version: str
    certificate: str
    secret: str
    blobs: str
    released: bool
    """Whether its holder ended in order."""
    remaining_s: float
    """Time until it expires, by the database's clock; not above zero once it has expired."""

    def leader(self, late_s: float = 0.0) -> Leader | None:
        """Return the server that holds it; None if it has expired, at least `late_s` ago."""
        if self.released or self.remaining_s <= -late_s:
            return None
        return Leader(self.token, self.address, self.version, self.certificate, self.secret)


def writer_name(token: int) -> str:
    """Return the name of the leader's writing sessions in the database."""
    return f"etfarm leader {token}"


class Fence:
    """The check of every write transaction that its server still leads.

    Args:
        token: that of the server's lease.
        on_fenced: called, in the thread of the transaction, if another server has taken the lease.
    """

    def __init__(self, token: int, on_fenced: Callable[[], object] = lambda: None) -> None:
        self._token = token
        self._on_fenced = on_fenced
        # It lets renewals go on, and a server that takes the lease wait. The name is that of `_END_WRITERS`.
        self.statement = (
            f"SELECT token = {token} AND NOT released, set_config('application_name', '{writer_name(token)}', false) "
            "FROM etfarm_cluster.lease WHERE id = 1 FOR KEY SHARE"
        )

    def close(self) -> None:
        """Refuse all further transactions, also while no other server has taken the lease."""
        self.statement = "SELECT false"

    def refuse(self) -> NoReturn:
        """Refuse a transaction, since another server has taken the lease. One that is permitted keeps it until its end.

        Raises:
            FENCED: always.
        """
        self._on_fenced()
        raise error_for(
            "FENCED",
            "This server no longer leads the farm, so it changes nothing.",
            "Try again; the server that leads now answers.",
            token=self._token,
        )


def creation() -> bytes:
    """Return the statements that create the tables of the lease where they are missing, for one transaction."""
    # Two servers that create a table at the same moment would fail. The secret has letters, digits, dashes and underscores.
    lock = f"SELECT pg_advisory_xact_lock({_TABLES_KEY});"
    row = f"INSERT INTO etfarm_cluster.lease (id, secret) VALUES (1, '{secrets.token_urlsafe(32)}') ON CONFLICT DO NOTHING"
    return f"{lock}{_TABLES}{_NEW_COLUMN}{row}".encode()


async def create_tables(session: Session) -> None:
    """Create the tables of the lease, once for all servers."""
    async with session.transaction():
        await session.execute(creation())


async def read(session: Session) -> LeaseRow:
    """Return the lease."""
    return await _read(session, _READ)


async def _read(session: Session, query: str) -> LeaseRow:
    async with session.cursor(row_factory=namedtuple_row) as cursor:
        row = await (await cursor.execute(query)).fetchone()
    assert row is not None, "create_tables inserts the row"
    return LeaseRow(**row._asdict())


async def take(
    session: Session, holder: str, address: str, version: str, certificate: str, *, asks_for_tokens: bool = False
) -> Leader | None:
    """Take an expired lease; return the new leader.

    Return None if another server was first, if a command holds the lease, or if a write of the former leader does not end.

    Args:
        asks_for_tokens: whether the new leader asks callers for tokens that the database does not have.
    """
    if (row := await read(session)).leader() is not None:
        return None
    # A process that stands still in the middle of a write would keep the lease from being taken.
    await session.execute(_END_WRITERS, {"name": writer_name(row.token)})
    try:
        async with session.transaction():
            await session.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
            former = await _read(session, _READ_FOR_UPDATE)
            if former.leader() is not None:
                return None
            values = {
                "holder": holder, "address": address, "version": version, "certificate": certificate, "lease_s": LEASE_S,
                "asks_for_tokens": asks_for_tokens,
            }  # fmt: skip
            taken = await (await session.execute(_TAKE, values)).fetchone()
            assert taken is not None
            await notify(session)
    except psycopg.errors.LockNotAvailable:
        log.warning("the lease could not be taken: a command such as `etfarm restore` holds it, or a write of the former leader")
        return None
    return Leader(taken[0], address, version, certificate, taken[1])


async def asks_for_tokens(session: Session) -> bool:
    """Return whether the last leader asks callers for tokens of its own file."""
    try:
        row = await (await session.execute("SELECT asks_for_tokens FROM etfarm_cluster.lease WHERE id = 1")).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):  # no server of this version has been there
        return False
    return row is not None and bool(row[0])


async def renew(session: Session, token: int, certificate: str, *, late_s: float) -> bool:
    """Renew the lease; return False if another server has it, or may take it now.

    Args:
        late_s: time since its expiry in which it may still be renewed. A database that stood still executes what was sent
            meanwhile, also for servers that no longer wait for that.
    """
    values = {"token": token, "certificate": certificate, "lease_s": LEASE_S, "late_s": late_s}
    return await (await session.execute(_RENEW, values)).fetchone() is not None


async def release(session: Session, token: int) -> None:
    """Give the lease up, after the last write, so that another server takes it at once."""
    async with session.transaction():
        await session.execute(_RELEASE, {"token": token})
        await notify(session)


async def notify(session: Session) -> None:
    """Let all servers look at the lease and at the servers at once."""
    await session.execute("SELECT pg_notify(%s, '')", (CHANNEL,))


@dataclass(frozen=True)
class ServerRow:
    """A server of the farm that was seen lately."""

    id: str
    address: str
    version: str
    started_at: Any


async def announce(session: Session, server_id: str, address: str, version: str) -> None:
    """Record that a server is there."""
    await session.execute(_SEEN, {"id": server_id, "address": address, "version": version})


async def leave(session: Session, server_id: str) -> None:
    """Remove a server that ends in order."""
    await session.execute("DELETE FROM etfarm_cluster.servers WHERE id = %s", (server_id,))


async def list_servers(session: Session) -> list[ServerRow]:
    """Return the servers that were seen lately, and forget the others."""
    values = {"present_s": PRESENT_S}
    await session.execute(_FORGET, values)
    async with session.cursor(row_factory=namedtuple_row) as cursor:
        rows = await (await cursor.execute(_SERVERS, values)).fetchall()
    return [ServerRow(**row._asdict()) for row in rows]


async def revision(session: Session) -> str | None:
    """Return the revision of the farm's tables; None for an empty database."""
    exists = await (await session.execute("SELECT to_regclass('alembic_version') IS NOT NULL")).fetchone()
    if exists is None or not exists[0]:
        return None
    row = await (await session.execute("SELECT version_num FROM alembic_version")).fetchone()
    return None if row is None else str(row[0])


async def count_death(session: Session, suspects: Mapping[str, int]) -> None:
    """Count a server's death for live jobs that it was handling: for all of them, or, if that fails, for none.

    Args:
        suspects: by job id, the count beyond which the death does not count.
    """
    if not suspects:
        return
    # If a newer version has migrated the database, nothing is counted.
    with contextlib.suppress(psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn):
        await session.execute(_COUNT_DEATH, {"jobs": list(suspects), "limits": list(suspects.values())})


async def claim_blobs(session: Session, blobs: str) -> str:
    """Record where the farm's blobs are, unless another server has; return what is recorded.

    Raises:
        psycopg.errors.LockNotAvailable: a command holds the lease.
    """
    async with session.transaction():
        await session.execute(f"SET LOCAL lock_timeout = {_LOCK_MS}")
        await session.execute("UPDATE etfarm_cluster.lease SET blobs = %s WHERE id = 1 AND blobs = ''", (blobs,))
    return (await read(session)).blobs
