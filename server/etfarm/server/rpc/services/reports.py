"""ReportService: reports of jobs, their operators, comparisons, tags and history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import EnumDescriptor

from etfarm.server.access.scope import Scope
from etfarm.server.jobs.records.history import History, Wanted
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.reports import PAGE_BYTES
from etfarm.server.jobs.records.tags import Tags
from etfarm.server.jobs.revision import Revision
from etfarm.server.rpc.door.caller import caller, require_owner, scope
from etfarm.server.rpc.door.roles import ADMIN
from etfarm.server.state.paging import PAGE_SIZES, page_size, page_start
from etfarm.v1 import comparison_pb2, job_pb2, report_pb2, report_service_pb2_grpc
from etfarm.v1.report_pb2 import OperatorGrouping, OperatorSort
from etfarm.wire import comparison, selectors, views
from etfarm.wire.comparison import Side
from etfarm.wire.errors import error_for
from etfarm.wire.report import job_json, report_json
from etfarm.wire.words import word_of

_PAGE_OF_OPERATORS: Final = 100, 1000
"""Default and maximum number of entries on a page."""

_Row = Mapping[str, Any]

_ORDERS: Final[dict[str, Callable[[_Row], Any]]] = {
    "own": lambda row: (-(row["share"] or 0.0), -(row["mean_ns"] or 0.0), row["index"]),
    "name": lambda row: (row["name"], row["index"]),
    "order": lambda row: row["index"],
}
"""Sort keys of single operators. They contain no other operators, so `total` sorts as `own` does."""
MAX_BYTES: Final = 60 << 20
"""Maximum size of a comparison, which must fit into a message of 64 MiB."""


Selected = tuple[job_pb2.Job, Sequence[report_pb2.Report], str | None]


class ReportService(report_service_pb2_grpc.ReportServiceServicer):
    """The servicer of ReportService; see report.proto."""

    def __init__(
        self,
        journal: Journal,
        history: History,
        tags: Tags,
        revision: Revision,
        *,
        version: str,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self._version = version
        self._page_bytes = page_bytes
        self._journal = journal
        self._history = history
        self._tags = tags
        self._revision = revision

    async def Get(self, request: report_pb2.GetReportsRequest, context: object) -> report_pb2.GetReportsResponse:
        start, size = page_start(request.page_token), page_size(request.page_size, *PAGE_SIZES)
        job = await self._journal.get(request.job_id, scope())
        reports, following = await self._journal.reports.page(
            job.id, start=start, size=size, most_bytes=self._page_bytes, cell_id=request.cell
        )
        token = "" if following is None else str(following)
        return report_pb2.GetReportsResponse(reports=reports, next_page_token=token)

    async def ListOperators(self, request: report_pb2.ListOperatorsRequest, context: object) -> report_pb2.ListOperatorsResponse:
        by, sort = _word(OperatorGrouping.DESCRIPTOR, request.by), _word(OperatorSort.DESCRIPTOR, request.sort) or "own"
        views.check(by or views.BY[0], sort)
        start = page_start(request.page_token)
        size = page_size(request.page_size, *_PAGE_OF_OPERATORS)
        report = await self._journal.reports.get(request.report_id, scope())
        return await asyncio.to_thread(_operators, report, by, sort, start, size)

    async def Compare(self, request: comparison_pb2.CompareRequest, context: object) -> comparison_pb2.CompareResponse:
        base, candidate = await self._select(request.base), await self._select(request.candidate)
        # Hundreds of reports have several hundred thousand operators.
        return await asyncio.to_thread(_answer, base, candidate)

    async def _select(self, reference: str) -> Selected:
        name, choice = comparison.split_choice(reference)
        job = await self._journal.get(name, scope())
        job.server_version = self._version
        of_job: list[report_pb2.Report] = []
        start: int | None = 0
        while start is not None:
            reports, start = await self._journal.reports.page(job.id, start=start)
            of_job += reports
        return job, of_job, choice

    async def Tag(self, request: report_pb2.TagJobRequest, context: object) -> report_pb2.TagJobResponse:
        principal = caller()
        is_admin = principal.role == ADMIN
        job = await self._journal.get(request.job_id, scope()) if request.job_id or not request.remove else job_pb2.Job()
        if request.remove:
            before = await self._tags.remove(request.tag, job.id, scope=_tag_scope(job), caller=principal.name, is_admin=is_admin)
        else:
            before = await self._tags.put(request.tag, job.id, project=job.project, caller=principal.name, is_admin=is_admin)
        return report_pb2.TagJobResponse(job_id=job.id or before, tag=request.tag, previous_job_id=before)

    async def ListHistory(self, request: report_pb2.ListHistoryRequest, context: object) -> report_pb2.ListHistoryResponse:
        wanted = Wanted(
            request.model,
            selectors.parse(request.device),
            request.recipe or None,
            request.method or None,
            request.threads if request.HasField("threads") else None,
        )
        size = page_size(request.page_size, *PAGE_SIZES)
        return await self._history.page(wanted, size, request.page_token, scope())

    async def Analyze(self, request: report_pb2.AnalyzeJobRequest, context: object) -> report_pb2.AnalyzeJobResponse:
        job = await self._journal.get(request.job_id, scope())
        require_owner(job.owner, f"Job {job.id}")
        return report_pb2.AnalyzeJobResponse(report_ids=[report.id for report in await self._revision.revise(job)])


def _word(enum: EnumDescriptor, number: int) -> str:
    """Return the word for a view; an unknown number as text, which no view is called."""
    return word_of(enum, number) or (str(number) if number else "")


def _tag_scope(job: job_pb2.Job) -> Scope:
    """Return the scope in which a tag to remove is looked up: the named job's project, else the caller's scope."""
    return Scope(frozenset({job.project}), job.project) if job.id else scope()


def _operators(report: report_pb2.Report, by: str, sort: str, start: int, size: int) -> report_pb2.ListOperatorsResponse:
    answer = report_pb2.ListOperatorsResponse()
    rows = report_json(report_pb2.Report(operators=report.operators))["operators"] or []
    if by:
        groups = views.group(rows, by, sort)
        count = len(groups)
        for group in groups[start : start + size]:
            answer.groups.add(**vars(group))
    else:
        by_index = {row.index: row for row in report.operators}
        in_order = sorted(rows, key=_ORDERS["own" if sort == "total" else sort])
        count = len(in_order)
        for row in in_order[start : start + size]:
            answer.operators.append(by_index[row["index"]])
    return _limit_page(answer, start, count)


def _limit_page(answer: report_pb2.ListOperatorsResponse, start: int, count: int) -> report_pb2.ListOperatorsResponse:
    """Shorten a page to what a message can contain, set the token of the next page, and return it."""
    entries = answer.operators or answer.groups
    bytes_left = PAGE_BYTES
    count_on_page = 0
    for entry in entries:
        bytes_left -= entry.ByteSize()
        if bytes_left < 0 and count_on_page:
            break
        count_on_page += 1
    del entries[count_on_page:]
    if start + count_on_page < count:
        answer.next_page_token = str(start + count_on_page)
    return answer


def _answer(base: Selected, candidate: Selected) -> comparison_pb2.CompareResponse:
    message = comparison.compare(_side(*base), _side(*candidate))
    if (size := message.ByteSize()) > MAX_BYTES:
        raise error_for(
            "COMPARISON_TOO_LARGE",
            f"The comparison must have at most {MAX_BYTES:,} bytes, got {size:,}.",
            "Compare a cell at a time: write JOB#0 and JOB#0.",
            limit=MAX_BYTES,
            got=size,
        )
    return comparison_pb2.CompareResponse(comparison=message)


def _side(job: job_pb2.Job, reports: Sequence[report_pb2.Report], choice: str | None) -> Side:
    return Side([report_json(report) for report in reports], job_json(job), None, choice)
