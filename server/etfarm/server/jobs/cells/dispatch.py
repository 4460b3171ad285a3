"""Dispatch of attempts: occupies a device, sends it the attempt, and frees the device once no cell shares the attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from etfarm.server.devices.runs import Progressed
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.server.jobs import generation, model
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.cells.limits import deadline_of
from etfarm.server.jobs.cells.progress import OnLine, OnProgress
from etfarm.server.jobs.cells.requirements import DeviceLacks, Requirements, require_support
from etfarm.server.jobs.cells.subjects import subject_of, workload_of
from etfarm.v1 import agent_pb2, job_pb2
from etfarm.v1.common_pb2 import Actor, Artifact, LogSource
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Attempt, Cell, Job, Progress
from etfarm.wire import selectors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.generation import MAX_SCORE_S
from etfarm.wire.messages import copy_fields

DEADLINE_S = 600.0
"""Default time limit of an attempt for each of its candidates."""
FURTHER_RUN_S = 120.0
"""Minimum addition to the default for each further run. It waits up to 70 s for the device, and has by default 10 s for its
warm-up and up to 60 s for iterations, of which it usually needs one. Short, since only the time limit ends a hanging program."""
MAX_FURTHER_RUNS_S = 86_400.0
"""Maximum addition for all further runs: a day, the maximum of `JobSpec.timeout_s`. A hanging program occupies its device."""
_BEFORE_TIMED_S = 80.0
"""Longest usual time from the start of a run to its timed pass."""
_DEFAULT_MAX_TIME_S = 60.0
"""Maximum duration of a timed pass that agents assume if Measurement.max_time_s is absent."""
_BEFORE_POINT_S = 60.0
"""Time for the warm-up of a point of generation, and for filling its context."""


class Dispatch:
    """The attempts that occupy devices, and the cells that share them."""

    def __init__(self, attempts: DeviceAttempts, requirements: Requirements) -> None:
        self._attempts = attempts
        self._requirements = requirements
        self._sharing: dict[str, set[str]] = {}
        """Ids of the cells that still use an attempt, by attempt id."""

    async def place(
        self, cell_runs: Sequence[CellRun], on_progress: OnProgress, on_line: OnLine, on_wait: Callable[[str], None]
    ) -> tuple[Device, Attempt]:
        """Wait for a device that can run the programs of all cells, and occupy it with a new attempt.

        Raises:
            DeviceLacks: no device that the selector matches can run them.
            DeadlineMissed, MAX_WAIT_OVER: no device was free in time.
        """
        job, first = cell_runs[0].job, cell_runs[0].cell
        selector = selectors.parse(first.selector)
        waiting = Waiting(
            cell_id=first.id,
            selector=selector,
            priority=job.spec.priority,
            order=(job.create_time.seconds * 10**9 + job.create_time.nanos, first.index),
            avoid=frozenset(attempt.device_id for run in cell_runs for attempt in run.cell.attempts),
            unfit=self._requirements.find_unfit_for_all(selector, cell_runs),
            project=job.project,
            threads=first.threads,
            cores=job.spec.measurement.cores,
            owner=job.owner,
            exclusive=job.spec.HasField("measurement"),
            reservation=job.spec.reservation_id,
            program=cell_runs[0].compilation.program.pte.digest if cell_runs[0].compilation is not None else "",
            deadline_s=deadline_of(job.spec),
        )
        listener = self._listener(job, [run.cell.id for run in cell_runs], on_progress, on_line)
        device, attempt_id = await self._attempts.place(waiting, listener, on_wait, subject_of(cell_runs))
        self._sharing[attempt_id] = {run.cell.id for run in cell_runs}
        return device, Attempt(id=attempt_id, device_id=device.id)

    def rejoin(self, job: Job, on_progress: OnProgress, on_line: OnLine) -> None:
        """Resume the job's attempts that an earlier server started, and wait for their agents."""
        for cell in job.cells:
            if cell.state != model.RUNNING:
                continue
            attempt = cell.attempts[-1]
            if self._attempts.is_live(attempt.id):
                continue  # an earlier cell of the loop shares the attempt
            sharing = [each.id for each in job.cells if each.state == model.RUNNING and each.attempts[-1].id == attempt.id]
            self._sharing[attempt.id] = set(sharing)
            listener = self._listener(job, sharing, on_progress, on_line)
            self._attempts.rejoin(
                attempt,
                listener,
                project=job.project,
                owner=job.owner,
                exclusive=job.spec.HasField("measurement"),
                work=workload_of(job.spec.measurement, [each for each in job.cells if each.id in sharing]),
            )

    def is_on_this_machine(self, device: Device) -> bool:
        """Return whether the device's agent runs on the server's own machine."""
        return self._attempts.is_on_this_machine(device.id)

    def device_of(self, cell: Cell) -> Device:
        """Return the device of the cell's last attempt."""
        return self._attempts.device(cell.attempts[-1].device_id)

    def cells_of(self, attempt_id: str) -> set[str]:
        """Return the ids of the cells that still use an attempt."""
        return self._sharing.get(attempt_id, set())

    def _listener(self, job: Job, cells: Sequence[str], on_progress: OnProgress, on_line: OnLine) -> Progressed:
        def announce(sent: agent_pb2.RunProgress) -> None:
            device = self._attempts.device(sent.device_id)
            cell_id = sent.cell_id if sent.cell_id in cells else cells[0]
            progress = Progress(cell_id=cell_id, actor=Actor.ACTOR_DEVICE, device_name=device.name)
            progress.phase, progress.message = sent.phase, sent.message
            copy_fields(sent, progress, ("duration_ms", "done", "total", "p50_ns"))
            on_progress(job.id, progress)
            for text in sent.log_lines:
                on_line(job.id, cell_id, LogSource.LOG_SOURCE_RUNNER, text)

        return announce

    async def find_lost(self, run: CellRun) -> list[str]:
        """Return the artifacts that the cell's agent would need, and that the store has lost since the cell was compiled."""
        return await self._requirements.find_lost(artifact.digest for artifact in _artifacts_of([run]))

    @property
    def starting(self) -> str:
        """Description of what the farm has to finish before anything can run; empty if nothing."""
        return self._attempts.starting

    async def send(self, cell_runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        """Send the last attempt, which the cells share, to its device.

        Returns:
            The errors (DeviceLacks), by cell id, of programs that the device's runner cannot run; these were not sent.

        Raises:
            BUNDLE_MISSING: the farm has no runner for the device.
            DeviceOffline: the device has disconnected in the meantime.
        """
        job, device = cell_runs[0].job, cell_runs[0].device
        assert device is not None
        runner = await self._attempts.runner_of(device)
        errors: dict[str, EtfarmError] = {}
        start = agent_pb2.StartRun(
            attempt_id=cell_runs[0].cell.attempts[-1].id,
            device_id=device.id,
            measurement=job.spec.measurement if job.spec.HasField("measurement") else None,
        )
        for run in cell_runs:
            cell, compilation = run.cell, run.compilation
            assert compilation is not None
            try:
                require_support(run.facts, runner, device)
            except DeviceLacks as error:
                errors[cell.id] = error
                continue
            start.candidates.add(
                cell_id=cell.id,
                program=compilation.program,
                method=cell.method,
                bundle=runner.bundle,
                inputs=run.inputs,
                threads=cell.threads if cell.HasField("threads") else None,
                numerics_program=run.numerics.program if run.numerics is not None else None,
                generation=run.generation,
                samples=run.samples,
                calls=run.calls,
                writes_state=run.writes_state,
            )
        if start.candidates:
            start.deadline_s = deadline_s(job, len(start.candidates))
            self._attempts.send(start, _artifacts_of(cell_runs))
        return errors

    def permit(self, cell_runs: Sequence[CellRun]) -> None:
        """Permit the agent of the last attempt to read the artifacts that the programs of the cells need."""
        self._attempts.permit(cell_runs[0].cell.attempts[-1].id, _artifacts_of(cell_runs))

    def end(self, cell: Cell) -> None:
        """End the cell's part in its last attempt after its result was written.

        Once all cells that share the attempt have ended their parts, the agent may delete it, or must stop it if it never
        answered. The device is then free.
        """
        if not cell.attempts:
            return
        attempt = cell.attempts[-1]
        if not self._attempts.has_answer(attempt.id):
            self.abandon(cell, "the attempt's result is no longer needed")
            return
        if self._is_last(attempt.id, cell):
            self._attempts.acknowledge(attempt.id, attempt.device_id)

    def abandon(self, cell: Cell, reason: str) -> None:
        """Stop the cell's last attempt if it may still run and no other cell shares it, and free the device."""
        if not cell.attempts:
            return
        attempt = cell.attempts[-1]
        is_live = self._attempts.is_live(attempt.id) and not self._attempts.has_answer(attempt.id)
        if is_live and self._is_last(attempt.id, cell):
            self._attempts.cancel(attempt.id, attempt.device_id, reason)

    def _is_last(self, attempt_id: str, cell: Cell) -> bool:
        """Remove the cell from those that share the attempt; return whether no cell is left."""
        sharing = self._sharing.get(attempt_id, set())
        sharing.discard(cell.id)
        if not sharing:
            self._sharing.pop(attempt_id, None)
        return not sharing


def _artifacts_of(cell_runs: Sequence[CellRun]) -> Iterable[Artifact]:
    """Yield the artifacts that an agent needs for the programs of cells, beside the runner bundle."""
    for run in cell_runs:
        assert run.compilation is not None
        programs = [run.compilation.program, *([run.numerics.program] if run.numerics is not None else [])]
        for program in programs:
            yield from (program.pte, *program.data.values())
        if run.inputs is not None:
            yield run.inputs
        yield from run.samples
        yield from (call.inputs for call in run.calls)
        if run.generation is not None:
            yield from (encoder.inputs for encoder in run.generation.model.flow.encoders if encoder.HasField("inputs"))


def _point_s(measurement: job_pb2.Measurement) -> float:
    """Return the longest usual time of a point's timed repetitions, of which the last may begin just before the limit."""
    return 2 * (measurement.max_time_s if measurement.HasField("max_time_s") else generation.DEFAULT_MAX_TIME_S)


def deadline_s(job: Job, candidates: int) -> float:
    """Return the time limit in seconds of an attempt with a number of candidates."""
    if job.spec.HasField("timeout_s"):
        return job.spec.timeout_s
    measurement = job.spec.measurement
    if measurement.HasField("generation"):
        process_s = generation.points_requested(measurement) * (_BEFORE_POINT_S + _point_s(measurement))
        runs_s = min(max(1, measurement.repeat) * process_s, MAX_FURTHER_RUNS_S)
        return (DEADLINE_S + 2 * MAX_SCORE_S) * max(1, candidates) + runs_s
    max_time_s = measurement.max_time_s if measurement.HasField("max_time_s") else _DEFAULT_MAX_TIME_S
    run_s = max(FURTHER_RUN_S, _BEFORE_TIMED_S + min(measurement.min_time_s, max_time_s))
    further_s = run_s * max(0, measurement.repeat - 1)
    return DEADLINE_S * max(1, candidates) + min(further_s, MAX_FURTHER_RUNS_S)
