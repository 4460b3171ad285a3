"""Stored readings of devices: one a minute for a day, and one in ten minutes for a week."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from etfarm.server.devices.telemetry import TelemetryLog
from etfarm.server.state import schema
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import DeviceTelemetry
from tests.support.refusals import refuses

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


class World:
    """A log, and a clock that the test turns."""

    def __init__(self, database: Database) -> None:
        self.time = NOON
        self.database = database
        self.log = TelemetryLog(self.database, lambda: self.time)

    def heartbeat(self, degrees: float, *devices: str) -> None:
        readings = {device: DeviceTelemetry(temperature_c=degrees) for device in devices or ("pi",)}
        for reading in readings.values():
            reading.time.FromDatetime(self.time)
        self.log.record(readings)

    async def degrees(self, device: str = "pi", start: datetime | None = None, end: datetime | None = None) -> list[float]:
        page, following = await self.log.page(device, start, end, 5_000, 0)
        assert following is None
        return [reading.temperature_c for reading in page]

    async def rows(self) -> int:
        query = select(func.count()).select_from(schema.device_telemetry)
        count: int = await self.database.read(lambda connection: connection.execute(query).scalar_one())
        return count


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


async def test_the_last_reading_of_each_minute_is_kept(world: World) -> None:
    for second in range(0, 180, 5):
        world.time = NOON + timedelta(seconds=second)
        world.heartbeat(second, "pi", "xl")
    assert await world.degrees() == [55, 115, 175]
    world.time += timedelta(seconds=1)
    world.heartbeat(99)
    assert await world.degrees() == [55, 115, 99]
    assert await world.degrees("xl") == [55, 115, 175]
    assert await world.degrees("absent") == []


@pytest.mark.remedy("BAD_TIME_RANGE")
async def test_a_time_range_and_pages_select_readings(world: World) -> None:
    for minute in range(10):
        world.time = NOON + timedelta(minutes=minute, seconds=30)
        world.heartbeat(minute)
    start, end = NOON + timedelta(minutes=2), NOON + timedelta(minutes=5, seconds=30)
    assert await world.degrees("pi", start, end) == [2, 3, 4]
    assert await world.degrees("pi", end) == [5, 6, 7, 8, 9]
    first, following = await world.log.page("pi", start, None, 3, 0)
    assert following is not None
    second, end_of_list = await world.log.page("pi", start, None, 5, following)
    assert [reading.temperature_c for reading in (*first, *second)] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert end_of_list is None
    with refuses("BAD_TIME_RANGE"):
        await world.log.page("pi", end, start, 3, 0)


async def test_old_readings_are_thinned_out_and_deleted(world: World) -> None:
    rows = []
    for minute in range(int(NOON.timestamp() // 60) - 8 * 1440, int(NOON.timestamp() // 60)):
        reading = DeviceTelemetry(load_1m=1.0)
        reading.time.FromSeconds(minute * 60)
        rows.append({"device_id": "pi", "minute": minute, "body": reading.SerializeToString()})
    await world.database.write(lambda connection: connection.execute(schema.device_telemetry.insert(), rows) and None)
    await world.log.thin()
    # A day of minutes, and six days of every tenth.
    assert await world.rows() == 1440 + 6 * 144
    world.time += timedelta(hours=1)
    await world.log.thin()
    assert await world.rows() == 1440 - 60 + 6 * 144


async def test_readings_in_memory_are_bounded(world: World) -> None:
    world.log = TelemetryLog(world.database, lambda: world.time, max_unwritten=3)
    for minute in range(10):
        world.time = NOON + timedelta(minutes=minute)
        world.heartbeat(minute)
    assert await world.degrees() == [7, 8, 9]


async def test_a_forgotten_device_has_no_readings(world: World) -> None:
    world.heartbeat(1, "pi", "xl")
    await world.log.flush()
    world.time += timedelta(minutes=1)
    world.heartbeat(2, "pi", "xl")
    await world.log.forget("pi")
    assert (await world.degrees("pi"), await world.degrees("xl")) == ([], [1, 2])
