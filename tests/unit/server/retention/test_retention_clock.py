"""The time by which ages count: never later than time has passed, and refused while the system's time is in doubt."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from etfarm.server.retention.clock import ClockImplausible, RetentionClock
from etfarm.server.state.engine import Database
from etfarm.server.state.steady_clock import SteadyClock
from tests.support.jobs import JournalWorld

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


class World:
    """A system's time, and the time that really passes."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.now = START
        self.elapsed = timedelta()

    def passes(self, time: timedelta) -> None:
        self.now += time
        self.elapsed += time

    def set(self, by: timedelta) -> None:
        self.now += by

    async def job(self) -> None:
        await JournalWorld(self.database, lambda: self.now).submit(f"{self.elapsed.total_seconds():016.0f}", at=self.now)

    async def clock(self) -> RetentionClock:
        """Start a server."""
        created = RetentionClock(lambda: self.now, lambda: self.elapsed.total_seconds())
        await created.load(self.database)
        return created


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


async def test_an_undisturbed_clock_is_the_systems(world: World) -> None:
    clock = await world.clock()
    assert clock.time() == world.now
    world.passes(400 * DAY)
    assert clock.time() == world.now


async def test_a_clock_that_is_set_forward_ages_nothing(world: World) -> None:
    await world.job()
    clock = await world.clock()
    world.passes(HOUR)
    world.set(10 * 365 * DAY)
    assert clock.time() == START + HOUR
    await world.job()
    world.passes(HOUR)
    assert clock.time() == START + 2 * HOUR, "also with records of the new time"
    world.set(-10 * 365 * DAY)
    assert clock.time() == world.now


async def test_a_clock_that_is_set_back_makes_everything_younger(world: World) -> None:
    await world.job()
    world.passes(DAY)
    clock = await world.clock()
    world.set(-DAY / 2)
    assert clock.time() == world.now


@pytest.mark.remedy("CLOCK_IMPLAUSIBLE")
async def test_a_server_that_starts_before_its_newest_record_waits_until_the_clock_is_set(world: World) -> None:
    await world.job()
    world.set(-20_000 * DAY)
    clock = await world.clock()
    with pytest.raises(ClockImplausible, match="20000 days before its last known time, 2026-01-02 03:04 UTC"):
        clock.time()
    world.passes(HOUR)
    world.set(20_000 * DAY)
    assert clock.time() == world.now
    world.set(DAY)
    world.passes(HOUR)
    assert clock.time() == world.now - DAY, "and from then on it is trusted no more than any other"


async def test_a_server_that_starts_long_after_its_newest_record_waits_for_a_day(world: World) -> None:
    await world.job()
    world.passes(200 * DAY)
    clock = await world.clock()
    with pytest.raises(ClockImplausible, match="200 days after its last known time") as refused:
        clock.time()
    assert "begins in 24 hours" in refused.value.remedy
    world.passes(DAY)
    assert clock.time() == world.now


async def test_a_server_that_was_off_for_some_days_deletes_at_once(world: World) -> None:
    await world.job()
    world.passes(6 * DAY)
    assert (await world.clock()).time() == world.now


async def test_a_jump_is_noticed_by_the_next_server_whatever_was_recorded_since(world: World) -> None:
    await world.job()
    clock = await world.clock()
    await clock.save(world.database)
    world.set(365 * DAY)
    world.passes(HOUR)
    await world.job()
    await clock.save(world.database)
    clock = await world.clock()
    with pytest.raises(ClockImplausible, match="365 days after its last known time, 2026-01-02 04:04 UTC"):
        await clock.save(world.database)
    world.set(-365 * DAY)
    assert (await world.clock()).time() == world.now, "records of the future are no reason to doubt the right time"


async def test_a_wrong_time_that_was_trusted_for_long_is_given_up_within_a_day(world: World) -> None:
    world.set(3650 * DAY)
    await (await world.clock()).save(world.database)
    world.set(-3650 * DAY)
    clock = await world.clock()
    with pytest.raises(ClockImplausible, match="3650 days before"):
        clock.time()
    world.passes(DAY)
    await clock.save(world.database)
    assert (await world.clock()).time() == world.now


def test_a_steady_clock_ignores_the_systems_time() -> None:
    wall_s, passed_s = 1_000_000.0, 50.0
    clock = SteadyClock(lambda: wall_s, lambda: passed_s)
    wall_s, passed_s = -5.0, 60.0
    assert clock() == 1_000_010.0


async def test_a_clock_that_was_set_right_is_not_doubted_again(world: World) -> None:
    await world.job()
    world.passes(5 * DAY)
    world.set(-3650 * DAY)
    clock = await world.clock()
    world.passes(3 * DAY)
    world.set(3650 * DAY)
    assert clock.time() == world.now
    world.passes(HOUR)
    assert clock.time() == world.now
