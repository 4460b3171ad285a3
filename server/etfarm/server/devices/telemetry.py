"""Stored readings of devices: the last of each minute for a day, and of each tenth minute for a week."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final

import structlog
from sqlalchemy import Connection, and_, delete, or_, select

from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.device_pb2 import DeviceTelemetry
from etfarm.wire.errors import EtfarmError, error_for

log = structlog.get_logger()

MINUTES_OF_DAY: Final = 24 * 60
KEPT_MINUTES: Final = 7 * MINUTES_OF_DAY
"""Age up to which readings are kept."""

THINNED: Final = 10
"""Of readings older than a day, those of each minute that this number divides are kept."""

PAGE_SIZES: Final = 500, 5_000

_FLUSH_S: Final = 60.0
MAX_UNWRITTEN: Final = 50_000
"""Maximum number of readings in memory, while the disk is full."""

_FLUSHES_OF_HOUR: Final = 60


class TelemetryLog:
    """The readings of all devices. They are written once a minute; those of the last minute may be lost in a crash.

    Args:
        now: returns the current time in UTC.
        max_unwritten: maximum number of readings in memory; the oldest are dropped.
    """

    def __init__(self, database: Database, now: Callable[[], datetime], max_unwritten: int = MAX_UNWRITTEN) -> None:
        self._max_unwritten = max_unwritten
        self._database = database
        self._now = now
        self._unwritten: dict[tuple[str, int], DeviceTelemetry] = {}
        self._thinned_to = 0
        """The minute up to which this server has thinned the readings."""

    def record(self, readings: Mapping[str, DeviceTelemetry]) -> None:
        """Take the readings of a heartbeat, by device id."""
        minute = _minute(self._now())
        for device_id, reading in readings.items():
            self._unwritten[device_id, minute] = reading
        while len(self._unwritten) > self._max_unwritten:
            del self._unwritten[next(iter(self._unwritten))]

    async def flush(self) -> None:
        """Write the readings that are in memory."""
        written, self._unwritten = self._unwritten, {}
        if not written:
            return
        rows = [
            {"device_id": device_id, "minute": minute, "body": seal(reading)} for (device_id, minute), reading in written.items()
        ]
        statement = insert(schema.device_telemetry)
        upsert = statement.on_conflict_do_update(index_elements=["device_id", "minute"], set_={"body": statement.excluded.body})
        try:
            await self._database.write(lambda connection: connection.execute(upsert, rows) and None)
        except EtfarmError:
            self._unwritten = written | self._unwritten
            raise

    async def thin(self) -> None:
        """Delete the readings that are no longer kept."""
        table, now = schema.device_telemetry, _minute(self._now())
        yesterday = now - MINUTES_OF_DAY
        is_surplus = and_(table.c.minute >= self._thinned_to, table.c.minute < yesterday, table.c.minute % THINNED != 0)
        statement = delete(table).where(or_(table.c.minute < now - KEPT_MINUTES, is_surplus))
        await self._database.write(lambda connection: connection.execute(statement) and None)
        self._thinned_to = yesterday

    async def tend(self) -> None:
        """Write and thin out readings, until cancelled."""
        flushes = 0
        while True:
            try:
                await self.flush()
                if flushes % _FLUSHES_OF_HOUR == 0:
                    await self.thin()
            except EtfarmError as error:
                log.warning("readings of devices could not be written, trying again", error=error.message)
            flushes += 1
            await asyncio.sleep(_FLUSH_S)

    async def page(
        self, device_id: str, start: datetime | None, end: datetime | None, size: int, after: int
    ) -> tuple[Sequence[DeviceTelemetry], int | None]:
        """Return a page of a device's readings, oldest first, and the minute that the next page starts at.

        Args:
            start, end: the readings from `start` on and before `end`; without a limit when None.
            size: maximum number of readings.
            after: the minute that the page starts at, from the page before; 0 for the first page.

        Raises:
            BAD_TIME_RANGE: `end` is before `start`.
        """
        if start is not None and end is not None and end < start:
            raise error_for("BAD_TIME_RANGE", "`end_time` must not be before `start_time`.", "Swap them.")
        await self.flush()
        table = schema.device_telemetry
        query = select(table.c.minute, table.c.body).where(table.c.device_id == device_id, table.c.minute >= after)
        if start is not None:
            query = query.where(table.c.minute >= _minute(start))
        if end is not None:
            query = query.where(table.c.minute <= _minute(end))
        query = query.order_by(table.c.minute).limit(size + 1)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        what = f"a reading of device {device_id}"
        readings = [reading for row in rows[:size] if (reading := unseal_or_none(DeviceTelemetry, row.body, what)) is not None]
        lowest = int(start.timestamp() * 1e9) if start is not None else 0
        highest = int(end.timestamp() * 1e9) if end is not None else 1 << 63
        within = [reading for reading in readings if lowest <= reading.time.ToNanoseconds() < highest]
        return within, rows[size].minute if len(rows) > size else None

    async def forget(self, device_id: str) -> None:
        """Delete the readings of a device."""
        for key in [key for key in self._unwritten if key[0] == device_id]:
            del self._unwritten[key]
        table = schema.device_telemetry

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(table.c.device_id == device_id))

        await self._database.write(write)


def _minute(at: datetime) -> int:
    return int(at.timestamp() // 60)
