"""A history has the reports of the caller's projects, and names no model of another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records.history import History, NoHistory, Wanted
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Job
from etfarm.v1.report_pb2 import Report
from etfarm.wire import selectors
from tests.support.databases import new_database

AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
VISION, AUDIO = Scope(frozenset({"vision"})), Scope(frozenset({"audio"}))


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    created = new_database(tmp_path / "farm.sqlite")
    await created.open()
    journal = Journal(created, Announcer(), lambda: AT)
    for index, (project, name, device) in enumerate((("vision", "net", "pi"), ("audio", "net", "xl"), ("audio", "secret", "xl"))):
        job = Job(id=f"job-{index}", owner="ann", project=project)
        job.create_time.FromDatetime(AT)
        job.cells.add(id=f"c{index}", job_id=job.id, state=model.QUEUED, version=1)
        job, _ = await journal.submit(job, job.id)
        report = Report(id=f"r{index}", cell=f"c{index}")
        report.model.name, report.model.digest, report.device.id = name, "abcd" * 16, device
        report.device.name = f"board-{device}"
        report.create_time.FromDatetime(AT)
        await journal.change(model.advance(job.cells[0], model.CANCELLED, at=AT), report=report)
    yield created
    created.close()


def no_devices(scope: Scope) -> list[Device]:
    return []


async def report_ids(history: History, model_name: str, scope: Scope, device: str = "") -> list[str]:
    answer = await history.page(Wanted(model_name, selectors.parse(device)), 10, "", scope)
    return sorted(entry.report.id for entry in answer.entries)


async def test_a_history_is_limited_to_the_scope_by_name_digest_and_device(database: Database) -> None:
    history = History(database, no_devices)
    assert await report_ids(history, "net", EVERYTHING) == ["r0", "r1"]
    assert await report_ids(history, "net", VISION) == ["r0"]
    assert await report_ids(history, "abcd", AUDIO) == ["r1", "r2"]
    assert await report_ids(history, "abcd", VISION, "name=board-xl") == []
    assert await report_ids(history, "abcd", AUDIO, "name=board-xl") == ["r1", "r2"]


async def test_known_models_are_those_of_the_scope(database: Database) -> None:
    history = History(database, no_devices)
    with pytest.raises(NoHistory) as refused:
        await report_ids(history, "secret", VISION)
    assert (refused.value.metadata["known"], "secret" in refused.value.remedy) == ("net", False)
    with pytest.raises(NoHistory, match="There are no reports yet"):
        await report_ids(history, "net", Scope(frozenset({"default"})))


async def test_devices_are_those_that_the_scope_sees(database: Database) -> None:
    asked: list[Scope] = []

    def devices(scope: Scope) -> list[Device]:
        asked.append(scope)
        return [Device(id="xl", name="renamed")]

    history = History(database, devices)
    assert await report_ids(history, "net", AUDIO, "name=renamed") == ["r1"]
    assert asked == [AUDIO]
