"""Database records of reservations: the current ones, and for some days those that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import Connection, delete, select, update

from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Reservation

KEPT: Final = timedelta(days=7)
"""Time for which a reservation that has ended is known, so that a late renewal gets an error that says so."""

MAX_KEPT: Final = 10_000
"""Maximum number of reservations that have ended and are known."""


class ReservationRecords:
    """The table of reservations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> Sequence[Reservation]:
        """Return the reservations that have not ended, oldest first. Those that are damaged in the database hold no device."""
        table = schema.reservations
        query = select(table.c.id, table.c.body).where(table.c.ended_at.is_(None)).order_by(table.c.created_at)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [each for row in rows if (each := _read(row.id, row.body)) is not None]

    async def insert(self, reservation: Reservation, request_id: str) -> None:
        """Write a new reservation, and delete those that ended long ago."""
        row = {
            "id": reservation.id,
            "owner": reservation.owner,
            "project": reservation.project,
            "request_id": request_id or None,
            "body": seal(reservation),
            "created_at": reservation.create_time.ToDatetime(UTC),
        }
        ended = schema.reservations.c.ended_at

        def write(connection: Connection) -> None:
            newest = select(ended).where(ended.is_not(None)).order_by(ended.desc()).offset(MAX_KEPT).limit(1)
            oldest = row["created_at"] - KEPT  # type: ignore[operator]
            if (last := connection.execute(newest).scalar()) is not None:
                oldest = max(oldest, last)
            connection.execute(delete(schema.reservations).where(ended.is_not(None), ended <= oldest))
            connection.execute(schema.reservations.insert(), row)

        await self._database.write(write, durable=True)

    async def renew(self, reservation: Reservation) -> None:
        """Write a new expiry."""
        table = schema.reservations
        change = update(table).where(table.c.id == reservation.id).values(body=seal(reservation))
        await self._database.write(lambda connection: connection.execute(change) and None, durable=True)

    async def end(self, ids: Sequence[str], at: datetime, how: str) -> None:
        """Record the end of reservations, with a phrase such as "was released by ann"."""
        table = schema.reservations
        change = update(table).where(table.c.id.in_(ids)).values(ended_at=at, how=how)
        await self._database.write(lambda connection: connection.execute(change) and None, durable=True)

    async def find(self, reservation_id: str) -> tuple[Reservation, str] | None:
        """Return a reservation with the phrase that says how it ended; None if it is unknown, or damaged in the database."""
        table = schema.reservations
        query = select(table.c.id, table.c.body, table.c.how).where(table.c.id == reservation_id)
        row = await self._database.read(lambda connection: connection.execute(query).one_or_none())
        reservation = None if row is None else _read(reservation_id, row.body)
        return None if row is None or reservation is None else (reservation, row.how or "")

    async def requested(self, owner: str, request_id: str) -> str | None:
        """Return the id of the reservation that the owner requested with this id; None if there is none."""
        table = schema.reservations
        query = select(table.c.id).where(table.c.owner == owner, table.c.request_id == request_id)
        reservation_id: str | None = await self._database.read(lambda connection: connection.execute(query).scalar())
        return reservation_id


def _read(reservation_id: str, body: bytes) -> Reservation | None:
    return unseal_or_none(Reservation, body, f"the reservation {reservation_id}")
