"""Check of a database file before anything is written to it."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

import structlog

from etfarm.server.state import schema
from etfarm.server.state.revisions import require_known
from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for

log = structlog.get_logger()

CHECK_S: Final = 30.0
"""Time limit of the check of all pages, which takes about 4 s per GB from memory. Unchecked pages fail when they are read."""

_MAGIC: Final = b"SQLite format 3\x00"
_STEPS: Final = 100_000
"""Number of SQLite instructions between two checks of the clock."""

_DAMAGED_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class DatabaseDamaged(FarmError):
    """A corrupt database file."""

    reason = "DATABASE_DAMAGED"
    kind = Kind.DATA_LOSS

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(
            f"The database {path} is damaged: {why.rstrip('.')}.",
            f"Stop the server, move {path.parent} aside and run `etfarm restore BACKUP --data {path.parent} "
            "--keep-identity`. Without a backup, "
            f"put a copy of {path.name} in its place, or move {path.name}, {path.name}-wal and {path.name}-shm aside and "
            "start `etfarm serve` once with --begin-empty to begin with an empty one; the artifacts stay.",
            path=path, why=why,
        )  # fmt: skip


def database_lost(database: object, place: str, data: Path, owner: str = "") -> EtfarmError:
    """Return the error of a database without tables beside the artifacts of a farm: the farm's own is lost, or elsewhere.

    Args:
        owner: what says whose artifacts they are, as "the object KEY"; empty if none does.
    """
    begin = f"delete {owner}, and start" if owner else "start"
    return error_for(
        "DATABASE_LOST",
        f"The database {database} is empty, but {place} has the artifacts of a farm.",
        "If the farm's database is another one, correct --database or --data. If it is lost, restore a backup: move "
        f"{data} aside and run `etfarm restore BACKUP --data {data} --keep-identity`, with the server's --config. Without "
        f"a backup, {begin} `etfarm serve` once with --begin-empty: the artifacts stay, and nothing refers to them.",
        database=database, place=place,
    )  # fmt: skip


def database_foreign(path: Path, why: str) -> EtfarmError:
    """Return the error of a SQLite database of another program."""
    return error_for(
        "DATABASE_FOREIGN",
        f"{path} is not a database of etfarm: {why}.", "Move it aside, or choose another --data.", path=path, why=why,
    )  # fmt: skip


def check(path: Path, head: str, known: Iterable[str], *, whole: bool = False) -> None:
    """Raise an error unless a file is an intact database of this etfarm or an earlier one. A missing file passes.

    Args:
        head: the newest revision, whose tables and columns are checked.
        known: all revisions that can be migrated to `head`.
        whole: whether to check all pages and indexes, however long that takes.

    Raises:
        DATABASE_UNUSABLE, DatabaseDamaged, DATABASE_FOREIGN, DATABASE_TOO_NEW, DATABASE_TOO_OLD: the file cannot be used; the
            error has a remedy.
    """
    if path.is_dir():
        raise error_for(
            "DATABASE_UNUSABLE", f"{path} is a directory, not a database.", "Move it aside, or choose another --data.", path=path
        )
    _check_access(path)
    wal = path.with_name(path.name + "-wal")
    if not path.exists() or path.stat().st_size == 0:
        if wal.exists() and wal.stat().st_size:
            raise DatabaseDamaged(path, "the file is empty, but it has a write-ahead log")
        return
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DatabaseDamaged(path, "it does not begin like a SQLite database")
    with _translated(path):
        connection = _open(path)
        try:
            _check_pages(connection, path, whole=whole)
            _check_schema(connection, path, head, set(known))
        finally:
            connection.close()


def _check_access(path: Path) -> None:
    for file in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        # Other processes that open and close the database create and remove the files beside it.
        if not _may_use(file) and file.exists() and not _may_use(file):
            raise _no_access(file)
    if not os.access(path.parent, os.R_OK | os.W_OK | os.X_OK):
        raise _no_access(path.parent)


def _may_use(file: Path) -> bool:
    return os.access(file, os.R_OK | os.W_OK)


def _no_access(path: Path) -> EtfarmError:
    return error_for(
        "DATABASE_UNUSABLE",
        f"The server may not read and write {path}.",
        f"Give it to the user that runs `etfarm serve` (uid {os.geteuid()}), or choose another --data.", path=path,
    )  # fmt: skip


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate SQLite's errors about the file into etfarm's errors."""
    try:
        yield
    except sqlite3.Error as error:
        if (known := error_of(path, error)) is not None:
            raise known from error
        raise


def error_of(path: Path, error: BaseException | None) -> EtfarmError | None:
    """Return etfarm's error for a SQLite error; None if the error does not concern the file."""
    if not isinstance(error, sqlite3.Error):
        return None
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if primary in _DAMAGED_CODES:
        return DatabaseDamaged(path, str(error))
    if primary == sqlite3.SQLITE_IOERR:
        return error_for(
            "DATABASE_UNUSABLE", f"The disk of the database {path} fails: {error}.", "Have the server's disk checked.", path=path
        )
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return error_for(
            "DATABASE_UNUSABLE",
            f"The database {path} cannot be written: {error}.",
            "Check the folder's permissions and mount.",
            path=path,
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return error_for(
            "DATABASE_UNUSABLE",
            f"Another program holds the database {path}: {error}.",
            "End it, `sqlite3` for example.",
            path=path,
        )
    return None


def _open(path: Path) -> sqlite3.Connection:
    """Open the file read-only, so that the write-ahead log of another database is not merged into it."""
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=10.0)
    connection.execute("PRAGMA trusted_schema=OFF")
    return connection


def _check_pages(connection: sqlite3.Connection, path: Path, *, whole: bool) -> None:
    began, timed_out = time.monotonic(), False

    def on_step() -> int:
        nonlocal timed_out
        timed_out = not whole and time.monotonic() - began > CHECK_S
        return timed_out

    connection.set_progress_handler(on_step, _STEPS)
    try:
        rows = connection.execute(f"PRAGMA {'integrity_check' if whole else 'quick_check'}(1)").fetchall()
    except sqlite3.OperationalError:
        if not timed_out:
            raise
        log.warning("the database is too large to be checked whole at the start", path=str(path), seconds=CHECK_S)
        return
    finally:
        connection.set_progress_handler(None, 0)
    if rows != [("ok",)]:
        raise DatabaseDamaged(path, " ".join(str(rows[0][0]).split()))


def _check_schema(connection: sqlite3.Connection, path: Path, head: str, known: set[str]) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    tables = {name for name in tables if not name.startswith("sqlite_")}
    if not tables:
        return
    if "alembic_version" not in tables:
        raise database_foreign(path, f"it has the tables {', '.join(sorted(tables)[:5])}")
    revisions = [row[0] for row in connection.execute("SELECT version_num FROM alembic_version")]
    if not revisions:
        raise DatabaseDamaged(path, "it has no revision")
    revision = str(revisions[0])
    if revision in known:
        if revision == head:
            _check_tables(connection, path, tables)
        return
    if len(revisions) == 1:
        require_known(revision)
    raise database_foreign(path, f"its revision is {revision[:40]!r}")


def _check_tables(connection: sqlite3.Connection, path: Path, tables: set[str]) -> None:
    for name, table in schema.metadata.tables.items():
        if name not in tables:
            raise DatabaseDamaged(path, f"it has no table {name!r}")
        columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
        if missing := sorted({column.name for column in table.columns} - columns):
            raise DatabaseDamaged(path, f"its table {name!r} has no column {missing[0]!r}")
