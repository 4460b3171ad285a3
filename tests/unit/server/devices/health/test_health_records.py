"""Health events in a real database: old ones are deleted, and the runs of the baseline stay."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from etfarm.server.access.scope import Scope
from etfarm.server.devices.health import book as health_book
from etfarm.server.devices.health import standing
from etfarm.server.devices.health.baseline import BASELINE_RUNS
from etfarm.server.devices.health.book import HealthBook, HealthRecords
from etfarm.server.devices.health.standing import Standing
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Device, HealthEvent, HealthEventKind
from etfarm.wire.errors import DeviceError

AT = datetime(2026, 1, 2, tzinfo=UTC)


async def test_power_cycles_of_the_last_day_outlive_other_events(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    monkeypatch.setattr(health_book, "MAX_EVENTS", 3)
    health = HealthRecords(database)
    for hour in range(40):
        event = HealthEvent(kind=HealthEventKind.HEALTH_EVENT_KIND_POWER_CYCLED if hour < 20 else 0)
        event.time.FromDatetime(AT + timedelta(hours=hour))
        await health.save("pi", Standing(AT), event)
    cycles = await health.power_cycles(AT)
    assert [at for _, at in cycles] == [AT + timedelta(hours=hour) for hour in range(16, 20)], "a day before the last event"
    assert len(await health.events("pi", 0, 500)) == 4 + 3


async def test_the_runs_of_the_baseline_outlive_later_ones(monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
    monkeypatch.setattr(health_book, "MAX_MEDIANS", 5)
    health = HealthRecords(database)
    known = Standing(AT, cleared_at=AT + timedelta(days=2, hours=12))
    for day in range(30):
        event = HealthEvent()
        event.time.FromDatetime(AT + timedelta(days=day))
        event.run.p50_ns = 1000.0 + day
        await health.save("pi", known, event, series="s")
        await health.save("other", replace(known, cleared_at=None), event, series="s")
    first = 3  # earlier runs are from before the health was cleared
    days = [*range(first, first + BASELINE_RUNS), *range(25, 30)]
    assert [pace.p50_ns for pace in await health.paces("pi", "s", None)] == [1000.0 + day for day in days]
    days = [*range(BASELINE_RUNS), *range(25, 30)]
    assert [pace.p50_ns for pace in await health.paces("other", "s", None)] == [1000.0 + day for day in days]


async def test_a_fault_or_a_forgotten_device_outlasts_the_recovery_of_another(database: Database) -> None:
    now = AT
    book = HealthBook(database, lambda: now)
    for device in ("first", "second", "third"):
        for _ in range(2):
            await book.record_fault(device, DeviceError("The runner crashed."))
    assert book.of("first").state == standing.SUSPECT
    now += timedelta(days=30)
    settling = asyncio.create_task(book.settle())
    await asyncio.sleep(0)
    assert book.of("first").state != standing.SUSPECT, "it waits for the database now"
    faults = [book.record_fault("second", DeviceError("The runner crashed.")) for _ in range(8)]
    await asyncio.gather(*faults, book.forget("third"), settling)
    assert book.of("second").state == standing.QUARANTINED
    assert "third" not in book._standings


async def test_the_text_of_a_fault_stays_within_the_project_of_its_attempt(database: Database) -> None:
    """It may have names and output of the project's program."""
    book = HealthBook(database, lambda: AT)
    for number in range(10):
        error = DeviceError("The runner ended in the method unreleased_model.")
        await book.record_fault("pi", error, attempt_id=f"a{number}", project="vision")
    (own,), _ = await book.events("pi", 0, 1, Scope(frozenset({"vision"})))
    (theirs,), _ = await book.events("pi", 0, 1, Scope(frozenset({"audio"})))
    assert (own.attempt_id, own.message) == ("a9", "The runner ended in the method unreleased_model.")
    assert (theirs.attempt_id, theirs.message, theirs.reason) == ("", "", own.reason)
    book.apply(device := Device(id="pi"))
    assert own.reason in device.health.reason and "unreleased" not in device.health.reason


async def test_whoever_sees_a_change_finds_its_event(database: Database) -> None:
    """A change takes effect before it is written."""
    book = HealthBook(database, lambda: AT)
    for number in range(1, 11):
        recording = asyncio.create_task(book.record_fault("pi", DeviceError("The runner crashed.")))
        await asyncio.sleep(0)
        book.apply(device := Device(id="pi"))
        assert device.health.fault_score == number
        assert len((await book.events("pi", 0, 50))[0]) == number
        await recording
