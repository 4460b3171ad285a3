"""An attempt, from the server's StartRun to a RunResult whose artifacts are uploaded: fetch, run and upload."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from etfarm.device_agents.attempts import repeats
from etfarm.device_agents.attempts.cache import Cache, Lease
from etfarm.device_agents.attempts.fetch import attempt_limit_s, fetch_program
from etfarm.device_agents.attempts.further import LIMIT_S as SAMPLES_LIMIT_S
from etfarm.device_agents.attempts.further import Further, execute_calls
from etfarm.device_agents.attempts.passes import TRACED_ITERATIONS, Passes, plan_of, planned_s, traced_iterations
from etfarm.device_agents.attempts.progress import OnRunProgress
from etfarm.device_agents.attempts.steps import CandidateSteps
from etfarm.device_agents.attempts.transfers import Transfers, attempt_channel
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.device.inventory import choose_cpus, format_cpu_list
from etfarm.device_agents.runners.protocol import Runner
from etfarm.device_agents.targets.base import Target
from etfarm.v1 import agent_pb2, job_pb2
from etfarm.wire import tensors
from etfarm.wire.status import to_proto
from etfarm.wire.tensors import Value

log = logging.getLogger(__name__)

_TIMING_PHASES: Final = frozenset({"WARMUP", "TIMED", "GENERATE", "TRACED"})


class Attempt:
    """One attempt on this device. `run` it once; cancelling that kills the runner.

    Args:
        config: the agent's settings.
        target: the device to run on.
        cache: the artifact cache.
        folder: the runners' working folder; created, and deleted at the end.
        start: the server's request, received now.
        on_progress: takes progress for the server; never blocks.
    """

    def __init__(
        self,
        config: AgentConfig,
        target: Target,
        cache: Cache,
        folder: Path,
        start: agent_pb2.StartRun,
        on_progress: OnRunProgress,
    ) -> None:
        self.config = config
        self.target = target
        self.folder = folder
        self.start = start
        self._cache = cache
        self._on_progress = on_progress
        self.received_s = time.monotonic()
        self.phase = ""
        """The current phase."""
        self._on_target = {candidate.cell_id for candidate in start.candidates}

    @property
    def needs_target(self) -> bool:
        """Whether the attempt still has work on the target; otherwise only transfers between this machine and the farm remain."""
        return bool(self._on_target)

    def left_target(self, cell_id: str) -> None:
        """Note that a candidate has no more work on the target."""
        self._on_target.discard(cell_id)

    @property
    def timing(self) -> bool:
        """Whether a pass is in progress that must not be disturbed."""
        return self.phase in _TIMING_PHASES

    async def run(self) -> agent_pb2.RunResult:
        """Run the attempt and return its result, with the errors of its candidates."""
        start = self.start
        try:
            async with attempt_channel(self.config, self.remaining_s(), attempt_limit_s(start)) as channel:
                transfers = Transfers.over(channel, self.config.pauses)
                with self._cache.lease(transfers) as lease:
                    results = await self._carry_out(transfers, lease)
                    if not self.target.measures_memory:
                        for result in results:
                            # Most of it belongs to the emulator.
                            result.memory.ClearField("peak_rss_bytes")
        finally:
            self.phase = ""
            shutil.rmtree(self.folder, ignore_errors=True)
        broken = next((result.error for result in results if result.error.reason == "DEVICE_SELF_TEST_FAILED"), None)
        return agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id, candidates=results, error=broken)

    async def _carry_out(self, transfers: Transfers, lease: Lease) -> list[agent_pb2.CandidateResult]:
        """Run the candidates one after the other, and none after the device failed; return their results."""
        results: list[agent_pb2.CandidateResult] = []
        for index, candidate in enumerate(self.start.candidates):
            if results and results[-1].error.reason == "DEVICE_SELF_TEST_FAILED":
                results.append(agent_pb2.CandidateResult(cell_id=candidate.cell_id, error=results[-1].error))
                continue
            results.append(await self.execution(candidate, transfers, lease, self.folder / str(index)).run())
        return results

    def execution(self, candidate: agent_pb2.RunCandidate, transfers: Transfers, lease: Lease, folder: Path) -> Execution:
        """Return how a candidate is executed."""
        return Execution(self, candidate, transfers, lease, folder)

    def remaining_s(self) -> float:
        """Return the attempt's remaining time in seconds."""
        return attempt_limit_s(self.start) - (time.monotonic() - self.received_s)

    def share_s(self, runs: int, run_s: float = math.inf) -> float:
        """Return the time in seconds that the next of `runs` remaining runs may take: what the others do not need.

        Args:
            runs: number of runs that share the attempt's remaining time.
            run_s: time that each later run needs; infinite if unknown, for an equal part.
        """
        left_s = self.remaining_s()
        return left_s if runs <= 1 else max(left_s / runs, left_s - run_s * (runs - 1))

    def send_progress(self, progress: agent_pb2.RunProgress) -> None:
        """Send progress to the server, with the ids of the attempt and the device."""
        progress.attempt_id, progress.device_id = self.start.attempt_id, self.start.device_id
        self._on_progress(progress)


@dataclass(frozen=True)
class Files:
    """A candidate's outputs and files, to be uploaded."""

    outputs: list[Value]
    samples: array[int] | None = None
    etdump: Path | None = None
    further: Further | None = None
    calls: Further | None = None


@dataclass
class Run:
    """One process that measures the program."""

    result: agent_pb2.CandidateResult
    """Its part of the candidate's result, or the whole for the first one."""
    left: int
    """Number of runs that are left, with this one."""
    work_s: float
    """Time that a run needs besides waiting for the device: what its plan asks for, or what a run of this attempt took if that
    was longer."""
    timed_s: float = 0.0
    """When its timed pass began, by the monotonic clock."""


class Execution(CandidateSteps):
    """One candidate of an attempt: FETCH, a fresh runner process with its passes for each run, UPLOAD."""

    def __init__(
        self, attempt: Attempt, candidate: agent_pb2.RunCandidate, transfers: Transfers, lease: Lease, folder: Path
    ) -> None:
        super().__init__(attempt, candidate, lease, folder)
        self._transfers = transfers

    async def run(self) -> agent_pb2.CandidateResult:
        """Run the candidate and return its result, complete or partial, with its error."""
        if await self.guarded(self._run):
            await self.numerics()
        return self.result

    async def numerics(self) -> None:
        """Run the numerics pass, if the job requests it. Its error is reported for this pass only."""
        if self._candidate.HasField("numerics_program"):
            self._runner = None
            error = await self._failure_of(self._run_numerics)
            if error is not None:
                self.result.numerics.error.CopyFrom(to_proto(error))
                self.report(force=True)

    def measured(self) -> None:
        """Note that all passes have ended, except for the numerics pass if there is one."""
        if not self._candidate.HasField("numerics_program"):
            self._attempt.left_target(self._candidate.cell_id)

    async def _run(self) -> None:
        attempt, target = self._attempt, self._attempt.target
        measurement = attempt.start.measurement if attempt.start.HasField("measurement") else None
        cpus = choose_cpus(target.device, measurement.cores if measurement else "", target.restricted)
        await self.fetch()
        await self.upload(await (self._execute(cpus) if measurement is None else self._measure(measurement, cpus)))

    async def _run_numerics(self) -> None:
        """Run FETCH, NUMERICS in a separate runner, and UPLOAD."""
        attempt, target, numerics_result = self._attempt, self._attempt.target, self.result.numerics
        cpus = choose_cpus(target.device, attempt.start.measurement.cores, target.restricted)
        candidate = agent_pb2.RunCandidate()
        candidate.CopyFrom(self._candidate)
        candidate.program.CopyFrom(self._candidate.numerics_program)
        with self.phase("FETCH"):
            fetched = await fetch_program(candidate, target, attempt.config.data, self._lease, self.report)
        async with self.start_runner() as runner:
            with self.phase("NUMERICS"):
                await self.load(runner, cpus, into=agent_pb2.CandidateResult(), instead=fetched, debug=True)
                recorded = await _record_numerics(runner, self.folder)
            await self._collect()
        self._runner = None
        attempt.left_target(candidate.cell_id)
        with self.phase("UPLOAD"):
            numerics_result.etdump.CopyFrom(await self._transfers.upload(recorded.etdump))
            numerics_result.debug.CopyFrom(await self._transfers.upload(recorded.debug))
            numerics_result.outputs.CopyFrom(await self._transfers.upload(tensors.encode(recorded.outputs)))
        await asyncio.to_thread(recorded.delete)

    async def _execute(self, cpus: frozenset[int] | None) -> Files:
        """Run everything from LOAD to the only execution of a job without a measurement, in a separate runner."""
        async with self.start_runner() as runner:
            await self.load(runner, cpus)
            with self.phase("RUN"):
                self.result.load.first_run_ns = (await runner.run()).run_ns
                return Files(await runner.outputs())

    async def _measure(self, measurement: job_pb2.Measurement, cpus: frozenset[int] | None) -> Files:
        """Measure the program in as many fresh runners as the job requests, one after the other.

        The passes after the timed one take place once, in the last runner: they would heat the device before the next run.
        """
        result, count = self.result, repeats.repeat_of(measurement)
        samples: array[int] = array("q")
        began_s: list[float] = []
        work_s = planned_s(plan_of(measurement))
        for number in range(1, count + 1):
            self.step = f"run {number} of {count}" if count > 1 else ""
            run = Run(result if number == 1 else agent_pb2.CandidateResult(), count - number + 1, work_s)
            files = await self._measure_run(run, measurement, cpus)
            assert files.samples is not None  # it was measured
            samples += files.samples
            began_s.append(run.timed_s)
            work_s = run.work_s
            if number > 1:
                repeats.add_run(result, run.result, (run.timed_s - began_s[0]) * 1e3)
            elif count > 1:
                result.runs.append(repeats.run_of(result))
        if count > 1:
            repeats.join_series(result, [(each_s - began_s[0]) * 1e3 for each_s in began_s])
        self.step = ""
        return replace(files, samples=samples)

    async def _measure_run(self, run: Run, measurement: job_pb2.Measurement, cpus: frozenset[int] | None) -> Files:
        """Wait until the device is ready, and measure the program in a fresh runner."""
        target, telemetry = self._attempt.target, run.result.telemetry
        if target.device.emulated:
            # Times of an emulated device are meaningless: there is nothing to wait for or to set.
            return await self._run_passes(run, measurement, cpus)
        telemetry.waits.extend(await self.wait(run.left, run.work_s))
        telemetry.affinity = format_cpu_list(cpus or target.usable_cpus())
        with target.settings(cpus) as settings:
            telemetry.settings.extend(settings)
            return await self._run_passes(run, measurement, cpus)

    async def _run_passes(self, run: Run, measurement: job_pb2.Measurement, cpus: frozenset[int] | None) -> Files:
        """Run everything from LOAD to the last pass of a run in a separate runner."""
        target = self._attempt.target
        began_s = time.monotonic()
        worked_s: list[float] = []

        def left_s() -> float:
            worked_s.append(time.monotonic() - began_s)
            # Times of an emulated device are meaningless, so a drifting pass is not continued.
            return 0.0 if target.device.emulated else self._share_s(run.left, max(run.work_s, worked_s[0]))

        async with self.start_runner() as runner:
            is_first = run.result is self.result
            if not is_first:
                # `load` reports no phase then, and a program that hangs in it must not count as waiting for the device.
                self.enter_phase("LOAD")
            method = await self.load(runner, cpus, into=None if is_first else run.result)
            passes = Passes(runner, method, run.result, self)
            samples = await passes.measure(plan_of(measurement), target.watch(cpus), left_s)
            # The first call is before a drifting pass is continued, which not every run needs.
            worked_s.append(time.monotonic() - began_s)
            run.work_s = max(run.work_s, worked_s[0])
            run.timed_s = passes.timed_s
            target.gates.measured()
            return await self.trace(passes, samples) if run.left == 1 else Files([], samples)

    async def trace(self, passes: Passes, samples: array[int]) -> Files:
        """Run TRACED, if the job requests it, and return the first execution's outputs and all files."""
        measurement = self._attempt.start.measurement
        etdump = None if measurement.no_profile else self.folder / "trace.etdp"
        minimum = measurement.trace_iterations if measurement.HasField("trace_iterations") else TRACED_ITERATIONS
        writes_state, iterations = self._candidate.writes_state, traced_iterations(samples, minimum)
        files = Files(await passes.compared_outputs(etdump, iterations, writes_state=writes_state), samples, etdump)
        await self._collect()
        if self._sample_files:
            with self.phase("SAMPLES"):
                further = await passes.execute_further(
                    self._sample_files, files.outputs, self._limit_s(), writes_state=writes_state
                )
                files = replace(files, further=further)
        if self._calls and files.further is not None and files.further.error is not None:
            # What interrupts a sample ends the runner.
            files = replace(files, calls=Further(error=files.further.error))
        elif self._calls:
            assert self._runner is not None  # it was measured
            with self.phase("CALLS"):
                files = replace(files, calls=await execute_calls(self._runner, self._calls, self._limit_s()))
        return files

    def _limit_s(self) -> float:
        """Return the time limit in seconds of executions for accuracy alone."""
        return min(SAMPLES_LIMIT_S, self._attempt.remaining_s() / 4)

    async def upload(self, files: Files) -> None:
        """Run UPLOAD of the result's artifacts."""
        self._runner = None
        self.measured()
        with self.phase("UPLOAD"):
            self.result.outputs.CopyFrom(await self._transfers.upload(tensors.encode(files.outputs)))
            if files.samples is not None:
                self.result.samples.CopyFrom(await self._transfers.upload(files.samples.tobytes()))
            if files.etdump is not None:
                self.result.etdump.CopyFrom(await self._transfers.upload(files.etdump))
            for executed, result in ((files.further, self.result.further), (files.calls, self.result.calls)):
                if executed is not None:
                    result.samples = executed.samples
                    result.outputs.CopyFrom(await self._transfers.upload(tensors.encode(executed.outputs)))
                    if executed.error is not None:
                        result.error.CopyFrom(to_proto(executed.error))


@dataclass(frozen=True)
class _Recorded:
    """The files and outputs of a numerics pass."""

    etdump: Path
    """Its events, which locate each value in `debug`."""
    debug: Path
    outputs: list[Value]

    def delete(self) -> None:
        """Delete the files, since the values of a large model take gigabytes."""
        self.etdump.unlink()
        self.debug.unlink()


async def _record_numerics(runner: Runner, folder: Path) -> _Recorded:
    """Execute the method once and record it; the files are in `folder`, or arrive there with `RemoteRunner.collect`.

    The values may fill half of the disk's free space, since other work needs some of it meanwhile.

    Args:
        runner: has the method loaded with `debug`, and its inputs set.
        folder: where to write the files.

    Raises:
        DEVICE_STORAGE_FAILED: the values exceed that limit, or the disk is full.
        As `Runner.debug`.
    """
    free = (await asyncio.to_thread(shutil.disk_usage, folder)).free
    done = await runner.debug(folder / "numerics.etdp", folder / "numerics.bin", max_bytes=free // 2)
    return _Recorded(done.etdump, done.dump, await runner.outputs())
