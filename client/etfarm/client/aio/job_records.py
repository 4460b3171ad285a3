"""The part of `AsyncFarm` that reads what jobs left: jobs, their history, tags and comparisons.

Its methods import what reads and compares reports: most commands need none of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from etfarm.client import reports
from etfarm.client.aio.connected import AsyncConnected
from etfarm.client.models import JobInfo, JobPage, JobState, Queue, QueuedRun
from etfarm.client.submit.options import require_at_least, to_list
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.paging import PAGE_SIZE, iterate_pages
from etfarm.client.transport.timestamps import to_timestamp
from etfarm.v1 import job_pb2, report_pb2
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.jobs.comparison import Compared
    from etfarm.client.jobs.history import HistoryEntry
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.reports import Comparison, JobResult


class AsyncJobRecords(AsyncConnected):
    """The jobs of a farm and their reports."""

    async def jobs(
        self,
        limit: int = 50,
        *,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        states: str | Sequence[str] = (),
        owner: str = "",
        model: str = "",
        since: datetime | None = None,
    ) -> list[JobInfo]:
        """Return the farm's jobs, newest first; with conditions, those that meet all of them.

        Args:
            limit: maximum number of jobs.
            name: a part of the job's name.
            labels: labels that the job has, with these values.
            states: one or several states, such as `FAILED`.
            owner: the principal that submitted the job.
            model: the name of one of the job's models.
            since: a time; only jobs that were submitted then or later.

        Raises:
            BAD_OPTION: `limit` is less than 1, or a state does not exist.
        """
        require_at_least("limit", limit, 1)
        page = await self.job_page(
            size=limit, name=name, labels=labels, states=states, owner=owner, model=model, since=since
        )  # fmt: skip
        return list(page.jobs)

    async def job_page(
        self,
        page_token: str = "",
        *,
        size: int = 50,
        name: str = "",
        labels: Mapping[str, str] | None = None,
        states: str | Sequence[str] = (),
        owner: str = "",
        model: str = "",
        since: datetime | None = None,
    ) -> JobPage:
        """Return a page of the farm's jobs, newest first, and the token of the next page.

        Args:
            page_token: `next_page_token` of the page before, with the same conditions; the first page when empty.
            size: maximum number of jobs.
            name, labels, states, owner, model, since: as in `jobs`.

        Raises:
            BAD_OPTION: `size` is less than 1, or a state does not exist.
            EtfarmError: BAD_PAGE_TOKEN.
        """
        require_at_least("size", size, 1)
        request = job_pb2.ListJobsRequest(
            page_token=page_token, name=name, labels=labels, states=_to_states(to_list(states)), owner=owner, model=model,
            start_time=to_timestamp(since),
        )  # fmt: skip
        jobs: list[JobInfo] = []
        token = ""
        request.page_size = min(size, PAGE_SIZE)
        # With conditions, the server's pages may have fewer jobs than it was asked for.
        async for page in iterate_pages(self._open.jobs.List, request, server=self._open.server):
            jobs += [decoded(JobInfo, job) for job in page.jobs]
            token = page.next_page_token
            if len(jobs) >= size:
                break
            request.page_size = min(size - len(jobs), PAGE_SIZE)
        return JobPage(tuple(jobs[:size]), token)

    async def watch_jobs(self, owner: str = "") -> AsyncIterator[JobInfo]:
        """Yield the live jobs of the caller's projects, and then each job that is submitted, changes or ends.

        It goes on until the caller leaves. A caller that reads slowly gets the latest state of a job. A broken stream is
        continued.

        Args:
            owner: only jobs that this principal submitted.

        Raises:
            EtfarmError: QUOTA_EXCEEDED; SERVER_UNREACHABLE if the server does not come back.
        """
        from etfarm.client.fleet import watches

        async for job in watches.watch_jobs(self._open, owner):
            yield job

    async def queue(self) -> Queue:
        """Return what waits for a device in the caller's projects, first ones first, and how much waits in others."""
        runs: list[QueuedRun] = []
        other_runs = 0
        request = job_pb2.ListQueueRequest(page_size=PAGE_SIZE)
        async for page in iterate_pages(self._open.jobs.ListQueue, request, server=self._open.server):
            runs += [decoded(QueuedRun, run) for run in page.runs]
            other_runs = page.other_runs
        return Queue(tuple(runs), other_runs)

    async def job(self, job_id: str) -> AsyncJob:
        """Return a job by its id, a unique prefix of at least 4 characters, a tag, a unique name, or `latest`.

        Raises:
            EtfarmError: JOB_NOT_FOUND.
        """
        from etfarm.client.jobs.job import AsyncJob

        request = job_pb2.GetJobRequest(job_id=job_id)
        return AsyncJob(self._open, await self._open.jobs.Get(request))

    async def history(
        self, model: str, *, device: str = "", recipe: str = "", method: str = "", threads: int | None = None, limit: int = 50
    ) -> list[HistoryEntry]:
        """Return the reports of a model, newest first; `etfarm.client.jobs.history.trends` groups them into series.

        Args:
            model: the model's name in reports, or at least the first 4 characters of its digest.
            device: a selector; all devices when empty.
            recipe, method, threads: exact values to filter by; all when empty.

        Raises:
            UserError: `device` is not a selector.
            EtfarmError: NO_HISTORY, which lists the models that have reports.
        """
        from etfarm.client.jobs import history

        require_at_least("limit", limit, 1)
        return await history.fetch(self._open, model, device=device, recipe=recipe, method=method, threads=threads, limit=limit)

    async def tag(self, job_id: str, tag: str) -> str | None:
        """Give a job a tag, which replaces its id wherever one is accepted.

        Return the id of the job that had the tag before.

        Raises:
            EtfarmError: BAD_TAG; JOB_NOT_FOUND; NOT_YOURS.
        """
        return await self._tag(report_pb2.TagJobRequest(job_id=job_id, tag=tag))

    async def untag(self, tag: str, job_id: str = "") -> str | None:
        """Remove a tag and return the id of the job that had it; with `job_id`, only from that job.

        Raises:
            EtfarmError: TAG_NOT_FOUND; JOB_NOT_FOUND; NOT_YOURS.
        """
        return await self._tag(report_pb2.TagJobRequest(job_id=job_id, tag=tag, remove=True))

    async def _tag(self, request: report_pb2.TagJobRequest) -> str | None:
        answer = await self._open.reports.Tag(request)
        return answer.previous_job_id or None

    async def analyze(self, job_id: str) -> JobResult:
        """Recompute a job's reports with the server's version from the stored files, and replace the old reports.

        Raises:
            EtfarmError: JOB_LIVE; JOB_NOT_FOUND; NOT_YOURS.
        """
        request = report_pb2.AnalyzeJobRequest(job_id=job_id)
        await self._open.reports.Analyze(request)
        return reports.JobResult.from_dict(await (await self.job(job_id)).document())

    async def compare(
        self,
        base: Compared,
        candidate: Compared,
        gate: str | Sequence[str] = (),
        *,
        strict: bool = False,
        accept_invalid: bool = False,
    ) -> Comparison:
        """Compare a candidate with a base: latency, operators, size, memory, accuracy, delegation and provenance.

        Args:
            base, candidate: a job, a report file or a result; see `etfarm.client.jobs.comparison.Compared`.
            gate: limits, `3%` (of latency) or `["latency=3%", "accuracy=1dB"]`; sets `Comparison.gate` and `Comparison.passed`.
                `gate.outcome` tells what is worse (`failed`) from what was not measured well enough to tell (`inconclusive`).
            strict: be inconclusive if an interval does not decide whether a limit is kept, instead of passing.
            accept_invalid: accept latencies with a verdict other than VALID.

        Raises:
            EtfarmError: BAD_GATE, BAD_REPORT_DOCUMENT; JOB_NOT_FOUND, REPORT_NOT_FOUND; NOTHING_TO_COMPARE.
        """
        from etfarm.client.jobs.comparison import compare, gate_of

        limits = gate_of(gate, strict=strict, accept_invalid=accept_invalid)
        return await compare(self._open, base, candidate, limits)


def _to_states(names: Sequence[str]) -> list[job_pb2.JobState.ValueType]:
    """Return the states with these names.

    Raises:
        BAD_OPTION: a state does not exist.
    """
    for name in names:
        if name not in JobState.__members__:
            known = ", ".join(JobState.__members__)
            raise error_for(
                "BAD_OPTION", f"`states` must be job states, got {name!r}.", f"Use {known}.", option="states", value=name
            )
    return [job_pb2.JobState.Value(f"JOB_STATE_{name}") for name in names]
