"""Reports of a job that do not fit into one message: the client has them all, from pages that a real server fills by size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from etfarm.client.jobs.job import AsyncJob
from etfarm.client.transport.stubs import Stubs
from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.records.history import History
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.requests import Request
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.rpc.door.interceptor import AuthErrorInterceptor
from etfarm.server.rpc.services.reports import ReportService
from etfarm.server.state.sqlite import SqliteDatabase
from etfarm.v1.job_pb2 import Job
from etfarm.v1.report_pb2 import GetReportsRequest, ListHistoryRequest, Report
from tests.support.authentications import authentication
from tests.support.fake_servers import stubs_of

AT = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
NAME_LENGTHS = (10, 3000, 10, 10, 10)
"""Of the cells' reports: the second alone exceeds a page, and two of the others fit into one."""
PAGE_BYTES = 200


class Finished:
    """A farm's reports of one job, and a client of it."""

    def __init__(self, job: Job, stubs: Stubs) -> None:
        self.job = job
        self.stubs = stubs
        self.client = AsyncJob(stubs, job)

    async def page(self, token: str = "", cell: str = "", size: int = 0) -> tuple[list[str], str]:
        request = GetReportsRequest(job_id=self.job.id, page_token=token, cell=cell, page_size=size)
        answer = await self.stubs.reports.Get(request)
        return [report.id for report in answer.reports], answer.next_page_token


@pytest.fixture
async def finished(tmp_path: Path) -> AsyncIterator[Finished]:
    database = SqliteDatabase(tmp_path / "farm.sqlite")
    await database.open()
    journal = Journal(database, Announcer(), lambda: AT)
    job = Job(id="job00000", owner="ann")
    job.create_time.FromDatetime(AT)
    for index in range(len(NAME_LENGTHS)):
        job.cells.add(id=f"c{index}", job_id=job.id, index=index, state=model.QUEUED, version=1)
    job, _ = await journal.submit(job, Request("once", b""))
    for cell, length in zip(job.cells, NAME_LENGTHS, strict=True):
        report = Report(id=f"r{cell.index}", cell=cell.id, state=model.CANCELLED)
        report.model.name = "net"
        report.create_time.FromDatetime(AT)
        report.latency.p50_ns = 1000
        report.operators.add(name="x" * length)
        report.compile.compilation.stage_files["forward.txt"].digest = f"d{cell.index}"
        await journal.change(model.advance(cell, model.CANCELLED, at=AT), report=report)
    history, tags = History(database, lambda scope: (), page_bytes=PAGE_BYTES), Tags(database, lambda: AT)
    revision: Any = None  # nothing here is analyzed again
    service = ReportService(journal, history, tags, revision, version="1", page_bytes=PAGE_BYTES)
    async with stubs_of(service, interceptors=[AuthErrorInterceptor(authentication(tmp_path))]) as stubs:
        yield Finished(await journal.get(job.id, EVERYTHING), stubs)
    database.close()


async def test_a_page_has_what_fits_and_one_report_at_least(finished: Finished) -> None:
    pages, token = [], ""
    while True:
        ids, token = await finished.page(token)
        pages.append(ids)
        if not token:
            break
    assert pages[:2] == [["r0"], ["r1"]]
    assert [one for page in pages for one in page] == ["r0", "r1", "r2", "r3", "r4"]
    assert any(len(page) > 1 for page in pages)


async def test_a_page_has_no_more_reports_than_requested(finished: Finished) -> None:
    assert await finished.page(size=1) == (["r0"], "1")
    assert await finished.page("3", size=1) == (["r3"], "4")
    assert await finished.page("4", size=1) == (["r4"], "")


async def test_a_history_is_slim_and_its_pages_have_what_fits(finished: Finished) -> None:
    request, pages = ListHistoryRequest(model="net"), []
    while not pages or request.page_token:
        answer = await finished.stubs.reports.ListHistory(request)
        pages.append([entry.report for entry in answer.entries])
        request.page_token = answer.next_page_token
    result = [report for page in pages for report in page]
    assert [report.id for report in result] == ["r4", "r3", "r2", "r1", "r0"]
    assert 1 < len(pages) < len(result), "the report with a long row is no larger than the others"
    assert all(report.latency.p50_ns == 1000 and not report.operators for report in result)


async def test_a_cell_s_report_comes_alone(finished: Finished) -> None:
    assert await finished.page(cell="c3") == (["r3"], "")
    assert await finished.page(cell="unknown") == ([], "")


async def test_the_client_has_all_reports_of_all_pages(finished: Finished) -> None:
    document = await finished.client.document()
    assert [len(report["operators"][0]["name"]) for report in document["reports"]] == list(NAME_LENGTHS)


async def test_the_client_asks_for_one_cell_s_files(finished: Finished) -> None:
    assert await finished.client.stage_files(4) == ["forward.txt"]
