"""A history has the reports of the caller's projects, and names no model of another."""

from __future__ import annotations

import pytest
from sqlalchemy import Connection
from sqlalchemy.event import listen

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records.history import History, Wanted
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Device
from etfarm.v1.report_pb2 import Report
from etfarm.wire import selectors
from tests.support.databases import sqlite_only
from tests.support.jobs import AT, JournalWorld
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

VISION, AUDIO = Scope(frozenset({"vision"})), Scope(frozenset({"audio"}))


@pytest.fixture
async def database(database: Database) -> Database:
    """The database of the running test, with reports of two projects."""
    world = JournalWorld(database)
    for index, (project, name, device) in enumerate((("vision", "net", "pi"), ("audio", "net", "xl"), ("audio", "secret", "xl"))):
        job = await world.submit(f"job-{index}", project=project)
        report = Report(id=f"r{index}", cell=job.cells[0].id)
        report.model.name, report.model.digest, report.device.id = name, "abcd" * 16, device
        report.device.name = f"board-{device}"
        report.create_time.FromDatetime(AT)
        await world.step(job.cells[0], model.CANCELLED, report=report)
    return database


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


@pytest.mark.remedy("NO_HISTORY")
async def test_known_models_are_those_of_the_scope(database: Database) -> None:
    history = History(database, no_devices)
    with refuses("NO_HISTORY") as refused:
        await report_ids(history, "secret", VISION)
    assert (refused.value.metadata["known"], "secret" in refused.value.remedy) == ("net", False)
    assert await report_ids(history, "net", VISION)
    with refuses("NO_HISTORY", match="There are no reports yet"):
        await report_ids(history, "net", Scope(frozenset({"default"})))


async def test_devices_are_those_that_the_scope_sees(database: Database) -> None:
    asked: list[Scope] = []

    def devices(scope: Scope) -> list[Device]:
        asked.append(scope)
        return [Device(id="xl", name="renamed")]

    history = History(database, devices)
    assert await report_ids(history, "net", AUDIO, "name=renamed") == ["r1"]
    assert asked == [AUDIO]


@pytest.mark.parametrize("model_name", ["net", "abcd"])
@sqlite_only
async def test_no_query_of_a_history_reads_all_reports(database: Database, model_name: str) -> None:
    queries: list[tuple[str, tuple[object, ...]]] = []

    def record(connection: Connection) -> None:
        listen(connection.engine, "before_cursor_execute", lambda c, cur, sql, values, ctx, many: queries.append((sql, values)))

    await database.read(record)
    assert await report_ids(History(database, no_devices), model_name, EVERYTHING, "name=board-xl")
    of_reports = [query for query in queries if "FROM reports" in query[0]]

    def plans(connection: Connection) -> list[str]:
        return [
            row.detail for sql, values in of_reports for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {sql}", values)
        ]

    details = [detail for detail in await database.read(plans) if "reports" in detail]
    assert len(details) >= len(of_reports) > 4
    assert all(detail.startswith("SEARCH reports USING") for detail in details), details
    assert model_name != "net" or any("COVERING INDEX reports_of_a_model_on_a_device" in detail for detail in details), details


async def test_a_name_precedes_a_digest_that_begins_alike(database: Database) -> None:
    def rename(connection: Connection) -> None:
        connection.exec_driver_sql("UPDATE reports SET model_name = 'abcd' WHERE id = 'r0'")

    history = History(database, no_devices)
    await database.write(rename)
    assert await report_ids(history, "abcd", EVERYTHING) == ["r0"]
    assert await report_ids(history, "abcda", EVERYTHING) == ["r0", "r1", "r2"]
    assert await report_ids(history, "abcd", AUDIO) == ["r1", "r2"]
