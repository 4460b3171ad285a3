"""Marks of databases that no server may open: one with an unfinished copy of a farm, and one whose farm was moved elsewhere."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, select

from etfarm.wire.errors import EtfarmError, error_for

MARKS: Final = MetaData()
"""The tables of the marks, which a database has only while it is marked."""

# One row for each table of the farm, until the copy is complete.
copying: Final = Table(
    "copying", MARKS,
    Column("name", String, primary_key=True),
    Column("source", String, nullable=False),
    # The key of the last row that was copied, as JSON; null before the first.
    Column("position", String),
)  # fmt: skip

# One row, in the database that a farm was moved from.
moved: Final = Table("moved", MARKS, Column("place", String, primary_key=True))


def copy_unfinished(target: object, source: str) -> EtfarmError:
    """Return the error of a database or a bucket to which a farm is being copied."""
    return error_for(
        "COPY_UNFINISHED",
        f"{target} has an unfinished copy of {source}.",
        "Run the same `etfarm migrate` or `etfarm restore` again: it continues. Or empty what it copies to.",
        target=target, source=source,
    )  # fmt: skip


def farm_moved(former: object, place: str, way_back: str) -> EtfarmError:
    """Return the error of a farm that `etfarm migrate` moved elsewhere; what is here is its state before that."""
    return error_for(
        "FARM_MOVED",
        f"The farm of {former} was moved to {place}.",
        f"Start the server with the options of the new place. To return to the state before the move, {way_back}.",
        former=former, place=place,
    )  # fmt: skip


def source_of(connection: Connection) -> str | None:
    """Return what is being copied to a database; None if it is complete."""
    if not inspect(connection).has_table(copying.name):
        return None
    source: str = connection.execute(select(copying.c.source).limit(1)).scalar_one()
    return source


def moved_to(connection: Connection) -> str | None:
    """Return where a database's farm was moved to; None if it was not moved."""
    if not inspect(connection).has_table(moved.name):
        return None
    place: str = connection.execute(select(moved.c.place)).scalar_one()
    return place


def require_current(connection: Connection, database: object) -> None:
    """Refuse a database without a complete farm, or whose farm is elsewhere.

    Raises:
        COPY_UNFINISHED, FARM_MOVED: it is not to be used.
    """
    if (source := source_of(connection)) is not None:
        raise copy_unfinished(database, source)
    if (place := moved_to(connection)) is not None:
        raise farm_moved(database, place, "drop the table `moved` in it")
