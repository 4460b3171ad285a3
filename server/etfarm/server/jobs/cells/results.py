"""Results of attempts: reservation of disk space, arrival, and checks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.server.artifacts.s3.waiting import retry_while_away
from etfarm.server.artifacts.store import Store
from etfarm.server.devices.runs import Runs
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.dispatch import Dispatch, deadline_s
from etfarm.server.jobs.cells.plausibility import (
    ImplausibleResult,
    Plan,
    artifacts_of,
    check_attempt,
    check_candidate,
    check_processes,
)
from etfarm.server.state.engine import retry_until_written
from etfarm.server.workers.reader_threads import Readers
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2
from etfarm.wire import digest
from etfarm.wire.errors import DeviceError, EtfarmError, error_for
from etfarm.wire.generation import logits_bytes
from etfarm.wire.samples import MAX_OUTPUTS_BYTES
from etfarm.wire.status import from_proto

GRACE_S = 300.0
"""Time after an attempt's deadline in which its result may still arrive, for slow uploads and reconnections."""

_RESULT_BYTES: Final = 16 << 20
"""Estimated size of samples and trace of a cell."""

_NUMERICS_BYTES: Final = 64 << 20
"""Estimated size of the recorded values of a cell."""

MAX_ERROR_BYTES: Final = 64 << 10
_CUT_CHARACTERS: Final = 4_000

_OUTPUT_BYTES: Final = 256 << 20
"""Maximum estimated size of one output."""


class AttemptOverdue(DeviceError):
    """An attempt whose agent is alive, but gave no result long after the deadline."""

    reason = "ATTEMPT_OVERDUE"

    def __init__(self, device_id: str, overdue_s: float) -> None:
        super().__init__(
            f"The agent sent no result within {overdue_s:g} s.",
            "Restart the agent; report it as a defect if it repeats.",
            device=device_id,
        )


class Results:
    """The results of attempts, from reservation of disk space to acceptance."""

    def __init__(self, runs: Runs, dispatch: Dispatch, store: Store, readers: Readers) -> None:
        self._runs = runs
        self._dispatch = dispatch
        self._store = store
        self._readers = readers

    async def reserve_room(self, cell_runs: Sequence[CellRun], on_wait: Callable[[str], None]) -> None:
        """Wait until the server's disk has space for the results of an attempt, and reserve it until `release_room`."""
        await self._store.wait_for_room(cell_runs[0].cell.id, sum(map(_estimate_bytes, cell_runs)), on_wait)

    async def wait_for_space(self, on_wait: Callable[[str], None]) -> None:
        """Wait while the server's disk is too full for a compilation."""
        await self._store.wait_for_space(on_wait)

    def release_room(self, cell_runs: Sequence[CellRun]) -> None:
        """Release the space that was reserved for the results of an attempt, if any."""
        self._store.room.release_results(cell_runs[0].cell.id)

    async def receive(self, cell_runs: Sequence[CellRun]) -> agent_pb2.RunResult:
        """Wait for the agent's answer to the last attempt, which the cells share.

        Raises:
            AttemptLost: the device abandoned the attempt, or did not reconnect.
            AttemptOverdue: the agent is alive and does not answer.
        """
        attempt = cell_runs[0].cell.attempts[-1]
        overdue_s = deadline_s(cell_runs[0].job, len(cell_runs)) + GRACE_S
        try:
            async with asyncio.timeout(overdue_s):
                return await self._runs.result(attempt.id)
        except TimeoutError:
            raise AttemptOverdue(attempt.device_id, overdue_s) from None

    async def check(
        self, answer: agent_pb2.RunResult, cell_runs: Sequence[CellRun]
    ) -> dict[str, agent_pb2.CandidateResult | EtfarmError]:
        """Return the results of the cells by cell id, or the reasons to reject them. RESULT_MISSING replaces a missing result.

        Raises:
            EtfarmError: the attempt as a whole failed, as the agent reports.
        """
        if answer.HasField("error"):
            raise from_proto(_cut(answer.error))
        plan = self._plan(cell_runs)
        check_attempt(answer, plan)
        for candidate in answer.candidates:
            if candidate.HasField("error"):
                _cut(candidate.error)
            for executed in (candidate.further, candidate.calls):
                if executed.HasField("error"):
                    _cut(executed.error)
        results = {candidate.cell_id: candidate for candidate in answer.candidates}
        return {run.cell.id: await self._check_cell(results.get(run.cell.id), run, plan) for run in cell_runs}

    def _plan(self, cell_runs: Sequence[CellRun]) -> Plan:
        """Return the server's request to the last attempt."""
        job, attempt = cell_runs[0].job, cell_runs[0].cell.attempts[-1]
        elapsed_s = self._runs.elapsed_s(attempt.id)
        if elapsed_s is None:
            # An earlier server sent the attempt; its clock set the time of placement.
            elapsed_s = time.time() - attempt.start_time.ToNanoseconds() / 1e9
            if elapsed_s < 0:  # the clock was set back in the meantime, so only the time limit is known
                elapsed_s = deadline_s(job, len(cell_runs)) + GRACE_S
        return Plan(
            cells=frozenset({run.cell.id for run in cell_runs} | self._dispatch.cells_of(attempt.id)),
            elapsed_s=elapsed_s,
            measurement=job.spec.measurement if job.spec.HasField("measurement") else None,
            planned_bytes=max(sum(run.facts.planned_bytes) for run in cell_runs),
            generation={run.cell.id: plan for run in cell_runs if (plan := run.generation) is not None},
        )

    async def _check_cell(
        self, candidate: agent_pb2.CandidateResult | None, run: CellRun, plan: Plan
    ) -> agent_pb2.CandidateResult | EtfarmError:
        """Return a candidate's result, or the reason to reject it. The job's project holds the files of an accepted result."""
        cell_id = run.cell.id
        if candidate is None:
            return error_for("RESULT_MISSING", f"The agent's result does not contain cell {cell_id}.", cell=cell_id)
        holder = self._runs.holder_of(run.cell.attempts[-1].id)
        project = run.job.project or DEFAULT_PROJECT
        try:
            check_processes(candidate, plan)
            if (executed := candidate.further.samples) > len(run.samples):
                raise ImplausibleResult(f"it has outputs of {executed:,} further samples, and {len(run.samples)} were sent")
            if (called := candidate.calls.samples) > len(run.calls):
                raise ImplausibleResult(f"it has outputs of {called:,} calls, and {len(run.calls)} were sent")
            named = dict.fromkeys(artifact.digest for artifact in artifacts_of(candidate))
            digests = list(filter(digest.is_digest, named))
            held = await self._store.find_held(digests, (holder, project)) if holder else digests
            stored = await self._store.sizes([each for each in digests if each in held])
            own = list(stored)
            foreign = next((each for each in named if each not in own), None)
            if foreign is not None and not candidate.HasField("error"):
                raise ImplausibleResult(f"it names the artifact {foreign[:12]!r}, which its agent did not upload")
            for artifact in artifacts_of(candidate):
                if artifact.size_bytes != (size_bytes := stored.get(artifact.digest, artifact.size_bytes)):
                    what = f"the artifact {artifact.digest[:12]!r} with {artifact.size_bytes:,} bytes, which has {size_bytes:,}"
                    raise ImplausibleResult(f"it names {what}")
            await retry_while_away(lambda: self._store.require_whole(own))
            await self._readers.run(check_candidate, candidate, plan, self._store.path)
        except ImplausibleResult as error:
            return error
        # From now on reports refer to the artifacts, so a session that also names them must not delete them.
        await retry_until_written(lambda: self._store.take_results(project, own, run.job.owner))
        return candidate


def _cut(error: common_pb2.Error) -> common_pb2.Error:
    """Cut the texts of an agent's error so that it has at most `MAX_ERROR_BYTES`: cells keep one of each attempt."""
    for key in sorted(error.metadata, key=lambda key: len(error.metadata[key]), reverse=True):
        if error.ByteSize() > MAX_ERROR_BYTES:
            error.metadata[key] = error.metadata[key][:_CUT_CHARACTERS]
    for key in sorted(error.metadata):
        if error.ByteSize() > MAX_ERROR_BYTES:
            del error.metadata[key]
    if error.ByteSize() > MAX_ERROR_BYTES:
        error.message, error.remedy = error.message[: 2 * _CUT_CHARACTERS], error.remedy[:_CUT_CHARACTERS]
    return error


def _estimate_bytes(run: CellRun) -> int:
    """Return the estimated size of a cell's result: outputs of all samples, times, trace and, with numerics, every value."""
    outputs = sum(_most_bytes(spec) for spec in run.facts.outputs)
    if (plan := run.generation) is not None:
        outputs += logits_bytes(len(plan.score.logits_after), plan.model.vocab_size)
    further = min(len(run.samples) * outputs, MAX_OUTPUTS_BYTES + outputs)
    further += (MAX_OUTPUTS_BYTES + outputs) if run.calls else 0
    return _RESULT_BYTES + 2 * outputs + further + (_NUMERICS_BYTES if run.job.spec.measurement.numerics else 0)


def _most_bytes(spec: compile_pb2.ValueSpec) -> int:
    # Dimensions without a finite maximum, or hostile ones, must not make a job wait for space that no disk has.
    size_bytes = 8
    for dim in spec.dims:
        size_bytes *= max(dim.max, 0)
        if not 0 < size_bytes < _OUTPUT_BYTES:
            break
    return min(size_bytes, _OUTPUT_BYTES)
