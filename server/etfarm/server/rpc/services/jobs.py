"""JobService: submission, queries and cancellation of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from datetime import datetime

from etfarm.server.jobs import model
from etfarm.server.jobs.conductor import Conductor
from etfarm.server.jobs.records.deletion import JobDeletion
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.listing import JOB_BYTES
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.records.quotas import Counted, Quotas
from etfarm.server.jobs.records.requests import Request
from etfarm.server.jobs.records.rows import job_not_found
from etfarm.server.jobs.records.selection import JobFilter
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.jobs.retry import cells_to_retry, spec_of_retry
from etfarm.server.jobs.submission import BadJob, Submission
from etfarm.server.jobs.waiting_list import WaitingList
from etfarm.server.rpc.door.caller import active_project, caller, names_project, require_owner, scope
from etfarm.server.rpc.services.protocol import require_served_client
from etfarm.server.rpc.services.times import read_time
from etfarm.server.state.cut import fit
from etfarm.server.state.paging import PAGE_SIZES, page_size, page_start
from etfarm.v1 import job_pb2, job_pb2_grpc
from etfarm.wire.errors import EtfarmError
from etfarm.wire.shielding import shielded


class JobService(job_pb2_grpc.JobServiceServicer):
    """The servicer of JobService; see job.proto."""

    def __init__(
        self,
        journal: Journal,
        joblog: JobLog,
        announcer: Announcer,
        submission: Submission,
        conductor: Conductor,
        *,
        version: str,
        now: Callable[[], datetime],
        deletion: JobDeletion,
        queue: WaitingList,
        quotas: Quotas | None = None,
        require_open: Callable[[], None] = lambda: None,
    ) -> None:
        """Initialize the servicer.

        Args:
            require_open: raises while the server accepts no new jobs.
        """
        self._require_open = require_open
        self._queue = queue
        self._streams = Counted("streams_per_user", "watched jobs and followed logs", (quotas or Quotas()).streams_per_user)
        self._journal = journal
        self._joblog = joblog
        self._announcer = announcer
        self._submission = submission
        self._conductor = conductor
        self._version = version
        self._now = now
        self._deletion = deletion
        self._accepting: set[asyncio.Task[job_pb2.Job]] = set()

    async def Submit(self, request: job_pb2.SubmitJobRequest, context: object) -> job_pb2.Job:
        require_served_client(request, self._version)
        if request.validate_only:
            self._require_open()
            project = active_project()
            await self._submission.require_quota(project)
            job = await self._submission.make(
                request.spec, owner=caller().name, project=project, at=self._now(), validate_only=True
            )
            return self._own(job)
        # Before the spec is checked, which completes it. A large one takes some milliseconds.
        sent = await asyncio.to_thread(
            Request.to_submit, request.request_id, request.spec, caller().project, names_project=names_project(),
            projects=scope().projects,
        )  # fmt: skip
        return await self._once(sent, lambda: self._submit(request.spec, sent, active_project()))

    async def Retry(self, request: job_pb2.RetryJobRequest, context: object) -> job_pb2.Job:
        sent = Request.to_retry(request)

        async def retry() -> job_pb2.Job:
            job = await self._journal.get(request.job_id, scope())
            return await self._submit(spec_of_retry(job), sent, job.project, cells_to_retry(job))

        return await self._once(sent, retry)

    async def _once(self, request: Request, submit: Callable[[], Awaitable[job_pb2.Job]]) -> job_pb2.Job:
        """Return the job that the caller's same request created before; submit it if the request is new.

        Nearly all are new. The journal looks for an earlier one when it writes the job; it is looked for here only if the
        request would be refused now.

        Raises:
            REQUEST_ID_USED: the caller has sent the id with something else.
        """
        if not request.id:
            raise BadJob("The request has no request_id.", "Send a UUID, the same one when you send it again.")
        try:
            return await submit()
        except EtfarmError:
            known = await self._journal.submitted(caller().name, request)
            if known is None:
                raise
            return self._own(_visible(known, request.id))

    async def _submit(
        self, spec: job_pb2.JobSpec, request: Request, project: str, cells: Sequence[job_pb2.Cell] = ()
    ) -> job_pb2.Job:
        self._require_open()
        await self._submission.require_quota(project)
        accepted = await self._submission.make(spec, owner=caller().name, project=project, at=self._now(), cells=cells)
        # A caller that disconnects in the meantime must not leave a job that is written but has no task.
        accepting = asyncio.create_task(self._accept(accepted, request), name=f"accept-{accepted.id}")
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)
        return self._own(_visible(await shielded(accepting), request.id))

    async def _accept(self, accepted: job_pb2.Job, request: Request) -> job_pb2.Job:
        job, is_new = await self._journal.submit(accepted, request)
        if is_new:
            self._conductor.start(job)
        return job

    async def Get(self, request: job_pb2.GetJobRequest, context: object) -> job_pb2.Job:
        job = await self._journal.get(request.job_id, scope())
        if job.ByteSize() > JOB_BYTES:
            await asyncio.to_thread(fit, job, JOB_BYTES)
        return self._present(job)

    async def List(self, request: job_pb2.ListJobsRequest, context: object) -> job_pb2.ListJobsResponse:
        size, before = page_size(request.page_size, *PAGE_SIZES), page_start(request.page_token)
        since = read_time(request, "start_time")
        chosen = JobFilter(request.name, dict(request.labels), tuple(request.states), request.owner, request.model, since)
        jobs, following = await self._journal.list(size, before if request.page_token else None, scope(), chosen)
        token = "" if following is None else str(following)
        return job_pb2.ListJobsResponse(jobs=[self._present(job) for job in jobs], next_page_token=token)

    async def Watch(self, request: job_pb2.WatchJobRequest, context: object) -> AsyncIterator[job_pb2.JobEvent]:
        job_id = await self._journal.find(request.job_id, scope())
        with self._streams.hold(caller().name):
            async for event in self._journal.watch(job_id, request.after_sequence):
                yield event

    async def WatchAll(self, request: job_pb2.WatchAllJobsRequest, context: object) -> AsyncIterator[job_pb2.JobChange]:
        with self._streams.hold(caller().name):
            async with aclosing(self._journal.farm.changes(scope(), request.owner)) as changes:
                async for change in changes:
                    yield change

    async def Cancel(self, request: job_pb2.CancelJobRequest, context: object) -> job_pb2.Job:
        job = await self._journal.get(request.job_id, scope())
        require_owner(job.owner, f"Job {job.id}")
        await self._conductor.cancel(job)
        return self._present(await self._journal.get(job.id, scope()))

    async def ListQueue(self, request: job_pb2.ListQueueRequest, context: object) -> job_pb2.ListQueueResponse:
        return self._queue.page(page_start(request.page_token), page_size(request.page_size, *PAGE_SIZES), scope())

    async def TailLog(self, request: job_pb2.TailJobLogRequest, context: object) -> AsyncIterator[job_pb2.LogLine]:
        job = await self._journal.get(request.job_id, scope())
        live = request.follow and not model.is_terminal(job.state)
        with self._streams.hold(caller().name):
            async for line in self._joblog.tail(job.id, request.cell_id, follow=live):
                yield line

    async def Delete(self, request: job_pb2.DeleteJobRequest, context: object) -> job_pb2.DeleteJobResponse:
        job = await self._journal.outline(request.job_id, scope())
        require_owner(job.owner, f"Job {job.id}")
        await self._joblog.flush()
        await self._deletion.delete(job.id, with_tags=request.force)
        return job_pb2.DeleteJobResponse(job_id=job.id)

    def _own(self, job: job_pb2.Job) -> job_pb2.Job:
        job.server_version = self._version
        return job

    def _present(self, job: job_pb2.Job) -> job_pb2.Job:
        """Return a job of the database as it is at this moment."""
        return self._announcer.add_phases(self._own(job))


def _visible(job: job_pb2.Job, request_id: str) -> job_pb2.Job:
    """Return the job of an earlier request, unless the caller is no longer a member of its project.

    Raises:
        JOB_NOT_FOUND: the job does not belong to any of the caller's projects.
    """
    if not scope().allows(job.project):
        raise job_not_found(request_id)
    return job
