"""A SQLite file that others may have changed: only its rows are read, and only as what etfarm itself would have written.

Its schema is never used for more than finding the rows: views, triggers, virtual tables and generated columns of it run nothing.
A restore copies the rows into tables of its own.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from etfarm.server.state import revisions, sqlite, sqlite_tables
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire import digest as digests

_VALUE_BYTES: Final = 256 << 20
"""Maximum size of a row."""
_ENTRIES: Final = 1_000
"""Maximum number of tables, indexes and triggers."""
_ENTRY: Final = re.compile(r"CREATE (TABLE|INDEX|UNIQUE INDEX|TRIGGER|VIEW) ")
"""How SQLite begins what it stores of each. Nothing else, such as a virtual table, is in a farm's database."""
_TABLE: Final = "CREATE TABLE "
_ROW_BYTES: Final = 4
"""Minimum number of bytes that a row takes in the file."""
_FACTOR: Final = 2
_SPARE_BYTES: Final = 16 << 20
"""How much more than the file the rows may have together: pages that are used twice would otherwise be rows without end."""
_PROGRESS_ROWS: Final = 10_000
_VERSION: Final = "alembic_version"
_LIMITS: Final = (
    (sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES), (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1 << 20),
    (sqlite3.SQLITE_LIMIT_COLUMN, 200), (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100), (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1), (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
)  # fmt: skip


class Malformed(Exception):
    """A file that etfarm has not written, or that somebody has changed since; the text says how."""


@dataclass(frozen=True)
class _Column:
    name: str
    is_valid: Callable[[Any], bool]


@dataclass(frozen=True)
class _Schema:
    """The tables of a revision, as its migrations create them."""

    tables: dict[str, list[_Column]]
    triggers: dict[str, str]


def rebuild(source: Path, target: Path, revision: str, on_progress: OnProgress) -> None:
    """Copy the rows of a file to a new one, whose tables, indexes and triggers are those of the revision.

    Args:
        source: the file, which nothing writes; beside it, no log is read.
        target: a file that does not exist.

    Raises:
        Malformed: the file is not one that etfarm wrote.
        OSError: the new file cannot be written.
    """
    schema = _create(target, revision)
    with closing(_open(source)) as reader, closing(sqlite3.connect(target, isolation_level=None)) as writer:
        _require_schema(reader, schema, revision)
        rows = _Rows(reader, schema, source.stat().st_size, on_progress)
        try:
            for pragma in ("foreign_keys=OFF", "synchronous=OFF", "journal_mode=MEMORY"):
                writer.execute(f"PRAGMA {pragma}")
            writer.execute("BEGIN")
            for name in schema.triggers:
                writer.execute(f'DROP TRIGGER "{name}"')
            for table, columns in schema.tables.items():
                names, marks = ", ".join(f'"{each.name}"' for each in columns), ", ".join("?" * len(columns))
                writer.execute(f'DELETE FROM "{table}"')
                writer.executemany(f'INSERT INTO "{table}" ({names}) VALUES ({marks})', rows.of(table))
            for text in schema.triggers.values():
                writer.execute(text)
            writer.execute("COMMIT")
            if broken := writer.execute("PRAGMA foreign_key_check").fetchone():
                raise Malformed(f"a row of its table {broken[0]!r} refers to one of {broken[2]!r} that is missing")
        except sqlite3.IntegrityError as error:
            raise Malformed(f"its rows contradict each other ({_short(error)})") from None
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error


def validate(source: Path, scratch: Path, revision: str, on_progress: OnProgress) -> None:
    """Read all rows of a file as `rebuild` does, which a command is about to open; also refuse triggers that are not etfarm's.

    Args:
        source: the file, which nothing writes, and which has no log.
        scratch: path of a file that does not exist.

    Raises:
        Malformed: the file is not one that etfarm wrote.
        OSError: the scratch file cannot be written.
    """
    try:
        schema = _create(scratch, revision)
    finally:
        for suffix in ("", *sqlite.LOGS):
            scratch.with_name(scratch.name + suffix).unlink(missing_ok=True)
    with closing(_open(source)) as reader:
        for name, text in _require_schema(reader, schema, revision).items():
            if schema.triggers.get(name) != text:
                raise Malformed(f"it has the trigger {name[:80]!r}, which is not etfarm's")
        rows = _Rows(reader, schema, source.stat().st_size, on_progress)
        for table in schema.tables:
            for _ in rows.of(table):
                pass


def revision_of(source: Path) -> str | None:
    """Return the revision of a file, as it says; None if it has none that this etfarm knows."""
    with closing(_open(source)) as reader:
        try:
            (text,) = reader.execute(f"SELECT sql FROM sqlite_master WHERE name = '{_VERSION}'").fetchone() or ("",)
            versions = reader.execute(f"SELECT version_num FROM {_VERSION}").fetchone() if str(text).startswith(_TABLE) else None
        except sqlite3.Error:
            return None
    return versions[0] if versions and versions[0] in revisions.known_revisions() else None


class _Rows:
    """The rows of a file, whose values are those that etfarm writes, and which are not more than fit into the file."""

    def __init__(self, reader: sqlite3.Connection, schema: _Schema, size_bytes: int, on_progress: OnProgress) -> None:
        self._reader = reader
        self._schema = schema
        self._left_bytes = _FACTOR * size_bytes + _SPARE_BYTES
        self._on_progress = on_progress
        self._done = 0
        reader.set_authorizer(self._authorize)

    def _authorize(self, action: int, table: str | None, column: str | None, _database: str | None, within: str | None) -> int:
        """Let SQLite read columns of tables, and do nothing else; what is within a view or a trigger is another's."""
        if within is None and action == sqlite3.SQLITE_SELECT:
            return sqlite3.SQLITE_OK
        is_known = table in self._schema.tables and column in {each.name for each in self._schema.tables[table]}
        return sqlite3.SQLITE_OK if within is None and action == sqlite3.SQLITE_READ and is_known else sqlite3.SQLITE_DENY

    def of(self, table: str) -> Iterator[Sequence[Any]]:
        """Yield the rows of a table.

        Raises:
            Malformed: one is not etfarm's, or there are too many.
        """
        columns = self._schema.tables[table]
        names = ", ".join(f'"{column.name}"' for column in columns)
        checks = [column.is_valid for column in columns]
        try:
            for row in self._reader.execute(f'SELECT {names} FROM "{table}"'):
                for value, is_valid in zip(row, checks, strict=True):
                    if value is not None and not is_valid(value):
                        bad = next(each for each, value in zip(columns, row, strict=True) if not _passes(each, value))
                        raise Malformed(f"its table {table!r} has a {bad.name!r} that etfarm does not write")
                self._left_bytes -= _ROW_BYTES + sum(len(value) for value in row if isinstance(value, str | bytes))
                if self._left_bytes < 0:
                    raise Malformed("it has more rows than fit into it: some of its pages are used twice")
                self._done += 1
                if self._done % _PROGRESS_ROWS == 0:
                    self._on_progress("rows read", self._done, self._done)
                yield row
        except sqlite3.Error as error:
            raise Malformed(f"its table {table!r} cannot be read ({_short(error)})") from None


def _short(error: sqlite3.Error) -> str:
    """Return a message without what it quotes of a value, which may be long."""
    return " ".join(str(error).split())[:200]


def _passes(column: _Column, value: Any) -> bool:
    return value is None or column.is_valid(value)


def _create(path: Path, revision: str) -> _Schema:
    """Create an empty database of a revision, and return what it has."""
    path.touch(mode=0o600)
    with sqlite.connected(path) as connection, connection.begin():
        if revision == revisions.HEAD:
            sqlite_tables.create(connection)
        else:
            revisions.upgrade(connection, path.parent, None, to=revision)
    sqlite.merge_log(path)
    with closing(sqlite3.connect(path)) as own:
        entries = own.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        tables = {}
        for kind, name, _ in entries:
            if kind == "table" and name != _VERSION:
                about = own.execute(f'PRAGMA table_info("{name}")').fetchall()
                tables[name] = [_Column(column, _check_of(name, column, declared)) for _, column, declared, *_ in about]
        return _Schema(tables, {name: text for kind, name, text in entries if kind == "trigger"})


def _check_of(table: str, column: str, declared: str) -> Callable[[Any], bool]:
    """Return what tells whether etfarm would write a value to a column. Paths are made of digests, and of nothing else."""
    if table == "artifacts" and column == "digest":
        return lambda value: isinstance(value, str) and digests.is_digest(value)
    if table == "artifacts" and column == "size_bytes":
        return lambda value: isinstance(value, int) and value >= 0
    kind = declared.partition("(")[0].upper()
    return _CHECKS[kind]


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is None
    except ValueError:
        return False


_CHECKS: Final[dict[str, Callable[[Any], bool]]] = {
    "VARCHAR": lambda value: isinstance(value, str),
    "TEXT": lambda value: isinstance(value, str),
    "INTEGER": lambda value: isinstance(value, int),
    "BIGINT": lambda value: isinstance(value, int),
    "BOOLEAN": lambda value: value in (0, 1),
    "FLOAT": lambda value: isinstance(value, float | int),
    "BLOB": lambda value: isinstance(value, bytes),
    "DATETIME": _is_time,
}


def _open(path: Path) -> sqlite3.Connection:
    """Open a file that is never written, without what SQLite offers to a schema."""
    # Immutable: neither a log beside the file is read, nor one written.
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    for limit, value in _LIMITS:
        connection.setlimit(limit, value)
    for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "query_only=ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _require_schema(reader: sqlite3.Connection, schema: _Schema, revision: str) -> dict[str, str]:
    """Require that the file has the tables of the revision as ordinary ones. Return the texts of its triggers.

    Raises:
        Malformed: it has not.
    """
    try:
        entries = reader.execute(f"SELECT type, name, sql FROM sqlite_master LIMIT {_ENTRIES + 1}").fetchall()
        for _, name, text in entries:
            if text is not None and not (isinstance(text, str) and _ENTRY.match(text)):
                raise Malformed(f"it has {str(name)[:80]!r}, which is no table, index or trigger of a farm")
        if len(entries) > _ENTRIES:
            raise Malformed(f"it has more than {_ENTRIES} tables, indexes and triggers")
        ordinary = {name for kind, name, text in entries if kind == "table" and text and text.startswith(_TABLE)}
        for table, columns in {**schema.tables, _VERSION: []}.items():
            if table not in ordinary:
                raise Malformed(f"it has no table {table!r}")
            hidden = {column: state for _, column, *_, state in reader.execute(f'PRAGMA table_xinfo("{table}")')}
            for column in columns:
                if hidden.get(column.name) != 0:
                    raise Malformed(f"its table {table!r} has no column {column.name!r}, or computes it")
        versions = reader.execute(f"SELECT version_num FROM {_VERSION} LIMIT 2").fetchall()
    except sqlite3.Error as error:
        raise Malformed(f"it cannot be read ({_short(error)})") from None
    if versions != [(revision,)]:
        raise Malformed(f"its revision is not {revision}")
    return {name: text for kind, name, text in entries if kind == "trigger"}
