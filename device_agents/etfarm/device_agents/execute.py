"""Steps 6 to 8 of a job's way: one attempt, from the server's StartRun to a RunResult whose artifacts are uploaded."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import psutil

from etfarm.device_agents.cache import Cache, Lease, Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.errors import NoRunner, NotReached, ProgramMismatch, SelfTestFailed, TransferTimedOut
from etfarm.device_agents.inventory import choose_cpus, choose_threads, format_cpu_list
from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import Limits, LogLine, NativeRunner
from etfarm.device_agents.runners.protocol import MeasurePlan, Progress, Runner
from etfarm.device_agents.telemetry import run_telemetry
from etfarm.v1 import agent_pb2, common_pb2, device_pb2, job_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.wire import digest, tensors
from etfarm.wire.channel import open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error, to_proto
from etfarm.wire.tensors import Value

log = logging.getLogger(__name__)

OnProgress = Callable[[agent_pb2.RunProgress], None]

TRACED_ITERATIONS: Final = 10
SHORT_TRACED_ITERATIONS: Final = 100
SHORT_NS: Final = 200_000
"""Median below which kernels are about as short as the resolution of the delegates' clocks, a microsecond: a small network
has dozens of them. 100 iterations of it are traced in 20 ms."""
_TIMING_PHASES: Final = frozenset({"WARMUP", "TIMED", "TRACED"})
_TRANSFER_PHASES: Final = frozenset({"FETCH", "UPLOAD"})
_DEFAULT_INPUTS_SEED: Final = 0
_KEPT_LOG_LINES: Final = 200
"""Between two RunProgress; of more, the last ones."""
_NO_DEADLINE_S: Final = 7 * 86_400.0


def plan_of(measurement: job_pb2.Measurement) -> MeasurePlan:
    """How long to measure, with the defaults for what is absent."""
    default, given = MeasurePlan(), measurement
    return MeasurePlan(
        warmup=given.warmup if given.HasField("warmup") else default.warmup,
        iterations=given.iterations if given.HasField("iterations") else default.iterations,
        min_time_ns=round(given.min_time_s * 1e9) if given.HasField("min_time_s") else default.min_time_ns,
        max_time_ns=max(1, round(given.max_time_s * 1e9)) if given.HasField("max_time_s") else default.max_time_ns,
        max_samples=given.max_samples if given.HasField("max_samples") else default.max_samples,
    )


def traced_iterations(samples_ns: Sequence[int]) -> int:
    """How many iterations to trace, from the timed ones; there is at least one."""
    return SHORT_TRACED_ITERATIONS if sorted(samples_ns)[len(samples_ns) // 2] < SHORT_NS else TRACED_ITERATIONS


class Attempt:
    """One attempt on this device. `run` it once; cancelling that kills the runner.

    Args:
        config: the agent's.
        device: this one.
        cache: of artifacts.
        folder: for the runners to work in; made, and deleted at the end.
        start: what the server asks for. Its receipt is now.
        on_progress: takes what the server is told meanwhile; never blocks.
    """

    def __init__(
        self,
        config: AgentConfig,
        device: device_pb2.Device,
        cache: Cache,
        folder: Path,
        start: agent_pb2.StartRun,
        on_progress: OnProgress,
    ) -> None:
        self.config = config
        self.device = device
        self.folder = folder
        self.start = start
        self._cache = cache
        self._on_progress = on_progress
        self.received_s = time.monotonic()
        self.phase = ""
        """What is under way."""

    @property
    def timing(self) -> bool:
        """Whether a pass is under way that nothing should disturb."""
        return self.phase in _TIMING_PHASES

    async def run(self) -> agent_pb2.RunResult:
        """The attempt's result, with the errors of its candidates."""
        start = self.start
        results: list[agent_pb2.CandidateResult] = []
        broken: common_pb2.Error | None = None
        try:
            async with open_channel(self.config.access) as channel:
                transfers = Transfers(ArtifactServiceStub(channel), self.config.pauses)
                with self._cache.lease(transfers) as lease:
                    for index, candidate in enumerate(start.candidates):
                        if broken is not None:
                            results.append(agent_pb2.CandidateResult(cell_id=candidate.cell_id, error=broken))
                            continue
                        results.append(await _Execution(self, candidate, transfers, lease, self.folder / str(index)).run())
                        if results[-1].error.reason == SelfTestFailed.reason:
                            broken = results[-1].error
        finally:
            self.phase = ""
            shutil.rmtree(self.folder, ignore_errors=True)
        return agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id, candidates=results, error=broken)

    def remaining_s(self) -> float:
        """What is left of the attempt's time."""
        limit = self.start.deadline_s if self.start.deadline_s > 0 else _NO_DEADLINE_S
        return limit - (time.monotonic() - self.received_s)

    def tell(self, progress: agent_pb2.RunProgress) -> None:
        """Sends progress, with what it is about."""
        progress.attempt_id, progress.device_id = self.start.attempt_id, self.start.device_id
        self._on_progress(progress)


@dataclass(frozen=True)
class _Fetched:
    """What a candidate needs, on this disk."""

    program: Path
    data: list[Path]
    inputs: list[Value] | None
    bundle: Bundle


class _Execution:
    """One candidate of an attempt: FETCH, a fresh runner process with its passes, UPLOAD."""

    def __init__(
        self, attempt: Attempt, candidate: agent_pb2.RunCandidate, transfers: Transfers, lease: Lease, folder: Path
    ) -> None:
        self._attempt = attempt
        self._folder = folder
        self._candidate = candidate
        self._transfers = transfers
        self._lease = lease
        self._result = agent_pb2.CandidateResult(cell_id=candidate.cell_id)
        self._lines: deque[str] = deque(maxlen=_KEPT_LOG_LINES)
        self._recent: deque[str] = deque(maxlen=60)
        self._told_s = 0.0
        self._bundle: Bundle | None = None
        self._runner: NativeRunner | None = None

    async def run(self) -> agent_pb2.CandidateResult:
        """The candidate's result, or as much of it as there is, with its error."""
        attempt = self._attempt
        deadline_s = attempt.start.deadline_s
        try:
            if attempt.remaining_s() <= 0:
                raise NotReached(deadline_s)
            deadline = asyncio.timeout(attempt.remaining_s())
            try:
                async with deadline:
                    await self._run()
            except TimeoutError:
                if not deadline.expired():
                    raise
                if attempt.phase in _TRANSFER_PHASES:
                    raise TransferTimedOut(attempt.phase, deadline_s) from None
                stage = self._runner.stage if self._runner else attempt.phase
                raise errors.ProgramHung(stage, deadline_s, list(self._recent)) from None
        except (errors.ProgramCrashed, errors.ProgramHung, errors.ProgramOutOfMemory) as error:
            self._fail(await self._judged(error))
        except grpc.aio.AioRpcError as error:
            self._fail(from_rpc_error(error, server=attempt.config.access.server))
        except EtfarmError as error:
            self._fail(error)
        return self._result

    def _fail(self, error: EtfarmError) -> None:
        error.stage = error.stage or self._attempt.phase
        self._result.error.CopyFrom(to_proto(error))
        self._tell(force=True)

    async def _run(self) -> None:
        attempt, result = self._attempt, self._result
        measurement = attempt.start.measurement if attempt.start.HasField("measurement") else None
        cpus = choose_cpus(attempt.device, measurement.cores if measurement else "", attempt.config.cores is not None)
        threads = self._candidate.threads if self._candidate.HasField("threads") else choose_threads(attempt.device, cpus)
        with self._phase("FETCH"):
            fetched = await self._fetch()
        self._bundle = fetched.bundle
        self._folder.mkdir(parents=True)
        async with self._start_runner(fetched.bundle) as runner:
            self._runner = runner
            with self._phase("LOAD"):
                hello = await runner.hello()
                result.runner.kind, result.runner.executorch = "native", hello.executorch
                result.runner.bundle_digest = self._candidate.bundle.artifact.digest
                if cpus is not None:
                    await runner.affinity(sorted(cpus))
                    result.runner.cores = format_cpu_list(cpus)
                result.threads = await runner.threads(threads)
                loaded = await runner.load(fetched.program, fetched.data)
                result.load.load_ns = loaded.load_ns
            method = self._candidate.method or (loaded.methods[0] if len(loaded.methods) == 1 else "forward")
            with self._phase("LOAD_METHOD"):
                result.load.load_method_ns = (await runner.load_method(method)).load_method_ns
                result.memory.planned_bytes.extend((await runner.method(method)).planned_bytes)
                if fetched.inputs is None:
                    await runner.default_inputs(_DEFAULT_INPUTS_SEED)
                else:
                    await runner.set_inputs(fetched.inputs)
            samples, etdump = None, None
            if measurement is None:
                with self._phase("RUN"):
                    result.load.first_run_ns = (await runner.run()).run_ns
                    outputs = await runner.outputs()
            else:
                samples = await self._measure(runner, plan_of(measurement))
                etdump = None if measurement.no_profile else self._folder / "trace.etdp"
                outputs = await self._first_outputs(runner, method, etdump, traced_iterations(samples))
        with self._phase("UPLOAD"):
            result.outputs.CopyFrom(await self._transfers.upload(tensors.encode(outputs)))
            if samples is not None:
                result.samples.CopyFrom(await self._transfers.upload(samples.tobytes()))
            if etdump is not None:
                result.etdump.CopyFrom(await self._transfers.upload(etdump))

    async def _fetch(self) -> _Fetched:
        """Everything from the cache or the server, verified.

        Raises:
            ProgramMismatch, NoRunner, BadTensorFile, BundleUnusable: the server sent what cannot be run.
            As `Lease.fetch`.
        """
        program = self._candidate.program
        manifest = digest.of_program(program.pte.digest, {name: data.digest for name, data in program.data.items()})
        if manifest != program.digest:
            raise ProgramMismatch(
                f"The program {program.digest[:12]} came with the files of {manifest[:12]}.",
                digest=program.digest,
                manifest=manifest,
            )
        if not self._candidate.HasField("bundle"):
            raise NoRunner(
                f"The farm has no runner for {self._attempt.device.arch}.", "Add one with `etfarm bundle build` and `bundle add`."
            )
        bundle = await self._lease.open_bundle(self._candidate.bundle.artifact, self._tell)
        if bundle.manifest.arch != self._attempt.device.arch:
            raise NoRunner(
                f"The runner that came is for {bundle.manifest.arch}, and this device is {self._attempt.device.arch}.",
                bundle_arch=bundle.manifest.arch,
                arch=self._attempt.device.arch,
            )
        pte = await self._lease.fetch(program.pte, self._tell)
        data = [await self._lease.fetch(artifact, self._tell) for _, artifact in sorted(program.data.items())]
        inputs: list[Value] | None = None
        if self._candidate.HasField("inputs"):
            path = await self._lease.fetch(self._candidate.inputs, self._tell)
            inputs = await asyncio.to_thread(lambda: tensors.decode(path.read_bytes()))
        return _Fetched(pte, data, inputs, bundle)

    def _start_runner(self, bundle: Bundle) -> AbstractAsyncContextManager[NativeRunner]:
        config = self._attempt.config
        limits = Limits(
            data_bytes=int(psutil.virtual_memory().available * config.memory_share),
            # The attempt's deadline is the one that counts, for all commands together.
            command_s=_NO_DEADLINE_S,
        )
        return NativeRunner.start(bundle.command(), self._folder, limits=limits, on_log=self._take_log)

    async def _measure(self, runner: Runner, plan: MeasurePlan) -> array[int]:
        """WARMUP and TIMED: the samples; everything else about them goes into the result."""
        began_s = time.monotonic()
        timed_s = 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal timed_s
            if progress.stage == "TIMED" and not timed_s:
                timed_s = time.monotonic()
                self._ended("WARMUP", began_s, timed_s)
            self._attempt.phase = progress.stage
            self._tell(progress.done, plan.warmup if progress.stage == "WARMUP" else plan.iterations)

        self._attempt.phase = "WARMUP"
        measured = await runner.measure(plan, on_progress)
        self._ended("TIMED", timed_s or began_s, time.monotonic())
        result = self._result
        result.warmup, result.iterations = measured.warmup, measured.iterations
        result.duration_ns, result.stop_reason = measured.duration_ns, measured.stop_reason
        result.load.first_run_ns = measured.first_run_ns
        if measured.peak_rss_bytes is not None:
            result.memory.peak_rss_bytes = measured.peak_rss_bytes
        result.telemetry.CopyFrom(run_telemetry(measured))
        return measured.samples_ns

    async def _first_outputs(self, runner: Runner, method: str, etdump: Path | None, iterations: int) -> list[Value]:
        """What the method gives when it runs for the first time after loading, which is what references are made of.

        With `etdump` this is the TRACED pass too, and `outputs_equal` tells whether it gave what the timed pass gave.
        A program that keeps state gives something else in each iteration: there the first executions are compared.
        """
        timed = await runner.outputs()
        if etdump is None:
            self._attempt.phase = "OUTPUTS"
            await runner.load_method(method)
            await runner.run()
            return await runner.outputs()
        with self._phase("TRACED"):
            await runner.load_method(method, trace=True)
            await runner.run()
            first = await runner.outputs()
            # That run has warmed it up.
            traced = await runner.trace(
                iterations, etdump, warmup=0, on_progress=lambda progress: self._tell(progress.done, iterations)
            )
            self._result.traced_ns.extend(traced.samples_ns)
            last = await runner.outputs()
            if first != last:
                await runner.load_method(method)
                await runner.run()
                timed = await runner.outputs()
            self._result.outputs_equal = first == timed
        return first

    async def _judged(self, error: EtfarmError) -> EtfarmError:
        """Whose fault it is that a program ended badly: the program's if its runner answers right after without it."""
        assert self._bundle is not None  # a program ran
        limit_s = self._attempt.config.self_test_s
        try:
            async with asyncio.timeout(limit_s), self._start_runner(self._bundle) as runner:
                await runner.hello()
        except (EtfarmError, TimeoutError) as failure:
            why = str(failure) or f"no answer within {limit_s:g} s"
            log.error("the self-test failed: %s", why)
            return SelfTestFailed(why, error)
        error.metadata["self_test"] = "passed"
        return _out_of_memory(error) or error

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A phase of the result, told when it begins and when it ends."""
        self._attempt.phase = name
        began_s = time.monotonic()
        self._tell(force=True)
        yield
        self._ended(name, began_s, time.monotonic())

    def _ended(self, name: str, began_s: float, ended_s: float) -> None:
        duration_ms = (ended_s - began_s) * 1e3
        start_ms = (began_s - self._attempt.received_s) * 1e3
        self._result.phases.add(actor="DEVICE", phase=name, start_ms=start_ms, duration_ms=duration_ms)
        self._attempt.phase = name
        self._tell(duration_ms=duration_ms, force=True)

    def _take_log(self, line: LogLine) -> None:
        self._lines.append(str(line))
        self._recent.append(str(line))

    def _tell(
        self, done: int | None = None, total: int | None = None, *, duration_ms: float | None = None, force: bool = False
    ) -> None:
        """Progress of the current phase. Not more often than the configuration allows, unless it is the phase's begin or end."""
        now = time.monotonic()
        if not force and now - self._told_s < self._attempt.config.progress_interval_s:
            return
        self._told_s = now
        progress = agent_pb2.RunProgress(cell_id=self._candidate.cell_id, phase=self._attempt.phase, log_lines=self._lines)
        self._lines.clear()
        if duration_ms is not None:
            progress.duration_ms = duration_ms
        if done is not None:
            progress.done = done
            # A pass that goes on for its least time passes the least number of iterations.
            if total is not None and done <= total:
                progress.total = total
        self._attempt.tell(progress)


def _out_of_memory(error: EtfarmError) -> errors.ProgramOutOfMemory | None:
    """The error again as one about memory, where the kernel killed the program: nobody else here sends SIGKILL unasked."""
    if not isinstance(error, errors.ProgramCrashed) or error.signal != "SIGKILL":
        return None
    killed = errors.ProgramOutOfMemory(error.stage, None, "the kernel killed it (SIGKILL)", error.log)
    killed.metadata.update(signal=error.signal, self_test=error.metadata["self_test"])
    return killed
