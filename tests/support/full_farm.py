"""A farm with rows in every table, of which each column has its odd values, and what two farms must have in common."""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Boolean, Column, Connection, Float, LargeBinary, Table, insert, select

from etfarm.server.artifacts.blobs import ARTIFACTS, write_blob
from etfarm.server.artifacts.s3.bucket import Bucket
from etfarm.server.artifacts.s3.claim import OWNER
from etfarm.server.artifacts.s3.location import BucketLocation
from etfarm.server.config import DATABASE
from etfarm.server.migrate.migration import Migration, Moved, Place
from etfarm.server.state import schema
from etfarm.server.transfer.database import FarmDatabase
from etfarm.server.transfer.rows import OnProgress
from etfarm.wire import digest as digests

COUNT = 7
"""Number of rows of each table, besides those that a new farm has."""
_TEXTS = ("", "ü€𝄞 \N{ZERO WIDTH JOINER}", "endless " * 1_000, "a\0b", "'; DROP TABLE jobs; --\n\t\\", "null", "0")
_WHOLES = (0, 1, -1, 2**63 - 1, -(2**63), 10**12, 7)
_FLOATS = (0.1, -0.0, float("inf"), 1e-300, -1.5, 123456789.123456789, 3.0)
_BYTES = (b"", b"\0", bytes(range(256)) * 20, b"'", b"\xff" * 10_000, b"{}", b"\\x00")
SIZES = (0, 1, 100, 10_000, 200_000)
"""Sizes of artifacts."""
LARGE = (17 << 20, *SIZES)
"""Those with one that is too large for one request to a bucket."""
LOCAL = Place(None, None)
_MOST = 20
"""Size of the values of further rows."""
_TIMES = (
    datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    *(datetime(2026, 1, day, 1, 2, 3, day, tzinfo=UTC) for day in range(1, 6)),
)  # fmt: skip


def fill(connection: Connection, count: int = COUNT) -> None:
    """Add rows to every table, in one transaction."""
    keys: dict[Column[Any], list[Any]] = {}
    with connection.begin():
        for table in schema.metadata.tables.values():
            rows = [_row(table, index, keys) for index in range(count)]
            for column in table.primary_key.columns:
                keys[column] = [row[column.name] for row in rows]
            connection.execute(insert(table), rows)


def _row(table: Table, index: int, keys: dict[Column[Any], list[Any]]) -> dict[str, Any]:
    unique = {column.name for constraint in table.constraints for column in getattr(constraint, "columns", ())}
    unique |= {column.name for each in table.indexes for column in each.columns}
    return {column.name: _value(table, column, index, keys, is_key=column.name in unique) for column in table.columns}


def _value(table: Table, column: Column[Any], index: int, keys: dict[Column[Any], list[Any]], *, is_key: bool) -> Any:
    for foreign in column.foreign_keys:
        return keys[foreign.column][index]
    if column.nullable and index == COUNT - 1:
        return None
    if isinstance(column.type, schema.UtcDateTime):
        return _TIMES[index % COUNT]
    if isinstance(column.type, LargeBinary):
        return (
            f"{table.name} {index}".encode()
            if column.name == "secret_hash"
            else _BYTES[index % COUNT][: _MOST if index >= COUNT else None]
        )
    if isinstance(column.type, Boolean):
        return index % 2 == 0
    if isinstance(column.type, Float):
        return _FLOATS[index % COUNT]
    if isinstance(column.type, schema.Text):
        return f"{'Zaä€'[index % 4]}{table.name}{index}" if is_key else _TEXTS[index % COUNT][: _MOST if index >= COUNT else None]
    return 3 * index + 1 if is_key else _WHOLES[index % COUNT]


def add_artifacts(data: Path, connection: Connection, sizes: Sequence[int]) -> None:
    """Store artifacts in files."""
    source = random.Random(1)
    for size_bytes in sizes:
        artifact = write_blob(data, source.randbytes(size_bytes))
        row = {"digest": artifact.digest, "size_bytes": artifact.size_bytes, "owner": "ann", "stored_at": _TIMES[3]}
        with connection.begin():
            connection.execute(insert(schema.artifacts).values(row))


def new_farm(data: Path, *, count: int = COUNT, sizes: Sequence[int] = SIZES) -> FarmDatabase:
    """Make the data folder of a farm whose rows are all odd, and whose artifacts exist.

    Args:
        sizes: those of the artifacts in bytes.
    """
    data.mkdir(mode=0o700, parents=True)
    database = FarmDatabase(data / DATABASE)
    database.open()
    with database.connected() as connection:
        if count:
            fill(connection, count)
        with connection.begin():
            connection.execute(schema.artifacts.delete())
        add_artifacts(data, connection, sizes)
    (data / ARTIFACTS / "uploads").mkdir()
    return database


def contents(database: FarmDatabase) -> dict[str, list[str]]:
    """Return the rows of every table, in an order that does not depend on the engine."""
    with database.connected() as connection, connection.begin():
        return {
            table.name: sorted(repr([_plain(value) for value in row]) for row in connection.execute(select(table)))
            for table in schema.metadata.tables.values()
        }


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value + 0.0  # SQLite has no negative zero
    return value.replace("\0", "␀") if isinstance(value, str) else value


def blobs_of(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a folder of artifacts by its name."""
    return {path.name: digests.of_file(path) for path in folder.glob("??/*")}


def objects_of(location: BucketLocation) -> dict[str, str]:
    """Return the digest of each artifact of a bucket by its name, and the keys of everything else but the claim."""

    async def read() -> dict[str, str]:
        bucket, digests_by_name = Bucket(location), dict[str, str]()
        async for page in bucket.list(""):
            for each in page:
                if each.key != OWNER:
                    data = b"".join([piece async for piece in bucket.pieces(each.key, each.size_bytes)])
                    digests_by_name[each.key.rpartition("/")[2]] = hashlib.sha256(data).hexdigest()
        return digests_by_name

    return asyncio.run(read())


def move(
    farm: FarmDatabase,
    source: Place,
    target: Place,
    on_progress: OnProgress = lambda what, done, total: None,
    *,
    skip_lost: bool = False,
) -> Moved:
    """Move a farm."""
    return Migration(farm.path.parent, source, target, on_progress, skip_lost=skip_lost).run()


def interrupted_at(what: str = "", part: float = 0.0) -> OnProgress:
    """Return a callback that interrupts a copy once, as Ctrl-C does, when a part of a step is done.

    Args:
        what: the step; the first one by default.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background lets it be ignored
    interruptions = iter([signal.SIGINT])

    def interrupt(happening: str, done: int, total: int) -> None:
        if what in ("", happening) and done >= total * part:
            for each in interruptions:  # a second one would end the wait for threads that still copy
                signal.raise_signal(each)

    return interrupt


@contextmanager
def committed(database: FarmDatabase) -> Iterator[Connection]:
    """Yield a connection in a transaction of its own."""
    with database.connected() as connection, connection.begin():
        yield connection
