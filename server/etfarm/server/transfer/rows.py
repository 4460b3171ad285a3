"""Copies of a farm's rows from one database to another, of either engine: in bounded batches, resumable, compared afterwards."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, delete, func, insert, literal, select, tuple_, update
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.state import schema
from etfarm.server.state.copies import copy_unfinished, copying, source_of
from etfarm.server.transfer.errors import CopyDiffers, RowRefused
from etfarm.wire.errors import error_for

_FETCH_ROWS: Final = 100
"""Number of rows that are read at a time."""
_BATCH_ROWS: Final = 500
_BATCH_BYTES: Final = 4 << 20
"""Number and size of the rows from which a batch is written."""
_WORD_BYTES: Final = 8
_MODULUS: Final = 1 << 256
_SHOWN_CHARACTERS: Final = 100
_LIMIT_EXCEEDED: Final = "54"
"""PostgreSQL's class of errors about limits, such as the size of an index's row."""

TABLES: Final = tuple(schema.metadata.tables.values())
"""The tables in the order of the schema: behind those that their rows refer to, and those whose triggers delete their rows."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, and how many are done out of all."""

Row = Sequence[Any]


class _Tally:
    """The number of a table's rows, and the sum of their digests, which does not depend on their order."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0

    def add(self, row: Row) -> None:
        """Count a row."""
        self.count += 1
        self.total = (self.total + _digest(row)) % _MODULUS

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tally) and (self.count, self.total) == (other.count, other.total)

    __hash__ = None  # type: ignore[assignment]


def _digest(row: Row) -> int:
    """Return the sha256 of a row's values, which is the same in each engine."""
    hasher = hashlib.sha256()
    for value in map(_canonical, row):
        data = value if isinstance(value, bytes) else repr(value).encode()
        for part in (type(value).__name__.encode(), data):
            hasher.update(len(part).to_bytes(_WORD_BYTES, "big"))
            hasher.update(part)
    return int.from_bytes(hasher.digest(), "big")


def _canonical(value: Any) -> Any:
    """Return a value as every engine can store it: PostgreSQL has no NUL in texts, SQLite neither NaN nor a negative zero."""
    if isinstance(value, str):
        return value.replace("\0", schema.NUL_SYMBOL)
    if isinstance(value, float):
        return None if math.isnan(value) else value + 0.0
    return value


def count_rows(connection: Connection) -> int:
    """Return the number of all rows."""
    return sum(connection.execute(select(func.count()).select_from(table)).scalar_one() for table in TABLES)


def begin(target: Connection, database: object, source: str) -> bool:
    """Mark a database as the copy of a farm; return whether one of the same farm was begun before.

    Args:
        database: the target's name for people.
        source: the name of what is copied.

    Raises:
        TARGET_NOT_EMPTY: the database has a farm of its own.
        COPY_UNFINISHED: it has an unfinished copy of another farm.
    """
    with target.begin():
        former = source_of(target)
        if former is not None:
            if former != source:
                raise copy_unfinished(database, former)
            return True
        for table in TABLES:
            if table is schema.farm:  # each database has an id from the start; it gets that of the source
                continue
            query = select(literal(1)).select_from(table).limit(1)
            if table is schema.projects:
                query = query.where(schema.projects.c.name != DEFAULT_PROJECT)
            if target.execute(query).first() is not None:
                raise error_for(
                    "TARGET_NOT_EMPTY",
                    f"The database {database} is not empty: its table {table.name!r} has rows.",
                    "Name an empty database; it gets its tables by itself.", database=database, table=table.name,
                )  # fmt: skip
        copying.create(target)
        target.execute(insert(copying), [{"name": table.name, "source": source} for table in TABLES])
        target.execute(delete(schema.projects))
        target.execute(delete(schema.farm))
    return False


def copy(source: Connection, target: Connection, on_progress: OnProgress) -> int:
    """Copy the rows that the target lacks, and compare all. Return the number of rows.

    Args:
        source: a connection in a transaction, which sees one snapshot.
        target: a connection without a transaction, to a database that is marked.

    Raises:
        CopyDiffers: the target has other rows: those of an interrupted copy whose source has changed since.
        RowRefused: the target cannot store a row.
    """
    total, done = count_rows(source), 0
    tallies = list[_Tally]()
    for table in TABLES:
        tally, position = _Tally(), _position(target, table)
        if position is not None:
            for row in rows_of(source, table, up_to=position):
                tally.add(row)
        for batch in _batches(rows_of(source, table, after=position)):
            _write(target, table, batch)
            for row in batch:
                tally.add(row)
            on_progress("rows copied", done + tally.count, total)
        tallies.append(tally)
        done += tally.count
    _compare(target, tallies, on_progress)
    return done


def _compare(target: Connection, expected: Sequence[_Tally], on_progress: OnProgress) -> None:
    """Read all rows of the target, and compare them with the source's."""
    total, done = sum(tally.count for tally in expected), 0
    with target.begin():
        for table, tally in zip(TABLES, expected, strict=True):
            actual = _Tally()
            for row in rows_of(target, table):
                actual.add(row)
                if actual.count % _BATCH_ROWS == 0:
                    on_progress("rows compared", done + actual.count, total)
            if actual != tally:
                how = "rows with other values" if actual.count == tally.count else f"{actual.count} rows instead of {tally.count}"
                raise CopyDiffers(
                    f"The copy of the table {table.name!r} has {how}.",
                    "The farm was changed during the copy, or a disk fails. Stop what uses both databases, and copy again.",
                    table=table.name,
                )  # fmt: skip
            done += actual.count
            on_progress("rows compared", done, total)


def rows_of(
    connection: Connection, table: Table, *, after: Sequence[Any] | None = None, up_to: Sequence[Any] | None = None
) -> Iterator[Row]:
    """Yield the rows of a table in the order of their keys, of which only some are in memory.

    Args:
        after: yield those with a greater key only.
        up_to: yield those without a greater key only.
    """
    columns = list(table.primary_key.columns)
    query, key = select(table).order_by(*columns), tuple_(*columns)
    if after is not None:
        query = query.where(key > _bound(table, after))
    if up_to is not None:
        query = query.where(key <= _bound(table, up_to))
    options = {"stream_results": True, "yield_per": _FETCH_ROWS}
    yield from connection.execute(query, execution_options=options)


def _bound(table: Table, key: Sequence[Any]) -> Any:
    return tuple_(*(literal(value, column.type) for value, column in zip(key, table.primary_key.columns, strict=True)))


def _position(target: Connection, table: Table) -> list[Any] | None:
    """Return the key of the last row that was copied."""
    with target.begin():
        text = target.execute(select(copying.c.position).where(copying.c.name == table.name)).scalar_one()
    return None if text is None else json.loads(text)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch, size_bytes = list[Row](), 0
    for row in rows:
        batch.append(row)
        size_bytes += sum(len(value) for value in row if isinstance(value, (str, bytes)))
        if len(batch) == _BATCH_ROWS or size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _write(target: Connection, table: Table, batch: Sequence[Row]) -> None:
    """Write rows, and the key of the last one, in one transaction."""
    names = [column.name for column in table.columns]
    key = [batch[-1][names.index(column.name)] for column in table.primary_key.columns]
    try:
        with target.begin():
            target.execute(insert(table), [dict(zip(names, row, strict=True)) for row in batch])
            target.execute(update(copying).where(copying.c.name == table.name).values(position=json.dumps(key)))
    except DBAPIError as error:
        is_too_large = (getattr(error.orig, "sqlstate", None) or "").startswith(_LIMIT_EXCEEDED)
        if not isinstance(error, (IntegrityError, DataError)) and not is_too_large:
            raise
        why = " ".join(str(error.orig).split())[:_SHOWN_CHARACTERS]
        raise RowRefused(
            f"A row of the table {table.name!r} up to {json.dumps(key)[:_SHOWN_CHARACTERS]} cannot be stored: {why}.",
            "If the farm ran since an interrupted copy, empty the target and copy again; else delete what the row is of.",
            table=table.name, why=why,
        ) from error  # fmt: skip


def finish(target: Connection) -> None:
    """Let the database number new rows, and take the mark away: from then on it is a farm's."""
    with target.begin():
        if target.dialect.name == schema.POSTGRESQL:
            for table in TABLES:
                column = table.autoincrement_column
                if column is not None:
                    following = select(func.coalesce(func.max(column), 0) + 1).scalar_subquery()
                    sequence = func.pg_get_serial_sequence(table.name, column.name)
                    target.execute(select(func.setval(sequence, following, False)))
        copying.drop(target)
