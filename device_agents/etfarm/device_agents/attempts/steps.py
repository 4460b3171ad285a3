"""The steps of a candidate on its device, within the attempt's time: fetch, wait, start a runner, and load."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Final, Protocol

import grpc

from etfarm.device_agents.attempts.cache import Lease
from etfarm.device_agents.attempts.fault_attribution import ABNORMAL_EXITS, attribute_fault, self_test_limit_s
from etfarm.device_agents.attempts.fetch import fetch_program
from etfarm.device_agents.attempts.progress import CandidateProgress, ProgressSink
from etfarm.device_agents.device.inventory import choose_threads, format_cpu_list
from etfarm.device_agents.errors import not_reached, transfer_timed_out
from etfarm.device_agents.runners import errors
from etfarm.device_agents.runners.protocol import DEFAULT_INPUTS_SEED, Loaded
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.targets.base import Provisions, Target
from etfarm.v1 import agent_pb2, common_pb2, report_pb2
from etfarm.wire import tensors
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error, to_proto
from etfarm.wire.tensors import Value
from etfarm.wire.words import value_of

_TRANSFER_PHASES: Final = frozenset({"FETCH", "UPLOAD"})


class CandidateAttempt(ProgressSink, Protocol):
    """The attempt, as the steps of its candidates see it."""

    target: Target
    start: agent_pb2.StartRun

    def remaining_s(self) -> float:
        """Return the attempt's remaining time in seconds."""

    def share_s(self, runs: int, run_s: float) -> float:
        """Return the time in seconds that the next of `runs` remaining runs may take, if each later one needs `run_s`."""

    def left_target(self, cell_id: str) -> None:
        """Note that a candidate has no more work on the target."""


class CandidateSteps(CandidateProgress):
    """The steps that every kind of execution consists of.

    Args:
        attempt: the candidate's attempt.
        candidate: what to run.
        lease: gets artifacts from the cache or the server.
        folder: the runners' working folder; `fetch` creates it.
    """

    def __init__(self, attempt: CandidateAttempt, candidate: agent_pb2.RunCandidate, lease: Lease, folder: Path) -> None:
        super().__init__(attempt, agent_pb2.CandidateResult(cell_id=candidate.cell_id))
        self._attempt = attempt
        self.folder = folder
        self._candidate = candidate
        self._lease = lease
        self._provisions: Provisions | None = None
        self._inputs: list[Value] | None = None
        self._sample_files: list[Path] = []
        self._calls: list[tuple[str, Path]] = []
        self._runner: RemoteRunner | None = None

    async def guarded(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Do a part of the candidate's work within the attempt's time; return whether it succeeded. An error is in the result."""
        error = await self._failure_of(work)
        if error is not None:
            self._attempt.left_target(self._candidate.cell_id)
            self.result.error.CopyFrom(to_proto(error))
            self.report(force=True)
        return error is None

    async def _failure_of(self, work: Callable[[], Awaitable[None]]) -> EtfarmError | None:
        """Do a part of the candidate's work within the attempt's time; return the error that ended it, or None."""
        try:
            await self._in_time(work)
            return None
        except ABNORMAL_EXITS as error:
            assert self._provisions is not None  # a program ran
            limit_s = self_test_limit_s(self._attempt.target, self._provisions)
            failure = await attribute_fault(error, self.start_runner(), limit_s)
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error, server=self._attempt.config.access.server)
        except EtfarmError as error:
            failure = error
        failure.stage = failure.stage or self._attempt.phase
        return failure

    async def _in_time(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do a part of the work within the attempt's time.

        Raises:
            ATTEMPT_TIMED_OUT, TRANSFER_TIMED_OUT, ProgramHung: the time is over.
        """
        attempt = self._attempt
        deadline_s = attempt.start.deadline_s
        if attempt.remaining_s() <= 0:
            raise not_reached(deadline_s)
        deadline = asyncio.timeout(attempt.remaining_s())
        try:
            async with deadline:
                await work()
        except TimeoutError:
            if not deadline.expired():
                raise
            if attempt.phase.startswith("WAIT_FOR_"):
                raise not_reached(deadline_s) from None
            is_transfer, runner = attempt.phase in _TRANSFER_PHASES, self._runner
            stage = attempt.phase if is_transfer or runner is None else runner.stage
            if runner is not None and runner.moving:
                moving_files = f"{runner.moving}, between the agent and {attempt.target.device.name},"
                raise transfer_timed_out(stage, deadline_s, moving_files) from None
            if is_transfer:
                raise transfer_timed_out(stage, deadline_s) from None
            raise errors.ProgramHung(stage, deadline_s, list(self.recent)) from None

    async def fetch(self) -> None:
        """Run FETCH: get everything from the cache or the server, verified, and the inputs if there are any.

        Raises:
            BadTensorFile: the inputs are not a tensor file.
            As `fetch_program`.
        """
        with self.phase("FETCH"):
            attempt = self._attempt
            self._provisions = await fetch_program(self._candidate, attempt.target, attempt.config.data, self._lease, self.report)
            await self.fetch_inputs()
        self.folder.mkdir(parents=True)

    async def fetch_inputs(self) -> None:
        """Get the inputs, if there are any, and the files of further samples and of calls.

        Raises:
            BadTensorFile: the inputs are not a tensor file.
        """
        if self._candidate.HasField("inputs"):
            self._inputs = await self.fetch_values(self._candidate.inputs)
        self._sample_files = [await self._lease.fetch(sample, self.report) for sample in self._candidate.samples]
        self._calls = [(call.method, await self._lease.fetch(call.inputs, self.report)) for call in self._candidate.calls]

    async def fetch_values(self, artifact: common_pb2.Artifact) -> list[Value]:
        """Return the values of a tensor file.

        Raises:
            BadTensorFile: it is none.
        """
        path = await self._lease.fetch(artifact, self.report)
        return await asyncio.to_thread(lambda: tensors.decode(path.read_bytes()))

    async def load(
        self,
        runner: RemoteRunner,
        cpus: frozenset[int] | None,
        *,
        into: agent_pb2.CandidateResult | None = None,
        instead: Provisions | None = None,
        debug: bool = False,
    ) -> str:
        """Run LOAD and LOAD_METHOD, set the inputs, and return the method's name.

        Args:
            runner: a fresh runner.
            cpus: cpus to bind it to; None leaves it unbound.
            into: gets the load times instead of the result, which has those of an earlier runner; no phase is reported then.
            instead: another program than the candidate's.
            debug: whether to load the method for `Runner.debug`.
        """
        loaded = await self.load_program(runner, cpus, into=into, instead=instead)
        result = self.result if into is None else into
        phase = self.phase if into is None else nullcontext
        method = self._candidate.method or (loaded.methods[0] if len(loaded.methods) == 1 else "forward")
        with phase("LOAD_METHOD"):
            result.load.load_method_ns = (await runner.load_method(method, trace=debug, debug=debug)).load_method_ns
            result.memory.planned_bytes.extend((await runner.method(method)).planned_bytes)
            if self._inputs is None:
                await runner.default_inputs(DEFAULT_INPUTS_SEED)
            else:
                await runner.set_inputs(self._inputs)
        return method

    async def load_program(
        self,
        runner: RemoteRunner,
        cpus: frozenset[int] | None,
        *,
        into: agent_pb2.CandidateResult | None = None,
        instead: Provisions | None = None,
    ) -> Loaded:
        """Run LOAD, and return what was loaded; the arguments are those of `load`."""
        fetched, self._runner = instead or self._provisions, runner
        assert fetched is not None  # the program was fetched
        result = self.result if into is None else into
        phase = self.phase if into is None else nullcontext
        threads = self._candidate.threads
        if not self._candidate.HasField("threads"):
            threads = choose_threads(self._attempt.target.device, cpus)
        with phase("LOAD"):
            hello = await runner.hello()
            result.runner.kind = value_of(common_pb2.RunnerKind, runner.kind)
            result.runner.executorch = hello.executorch
            if fetched.bundle is not None:
                result.runner.bundle_digest = self._candidate.bundle.artifact.digest
            if cpus is not None:
                await runner.affinity(sorted(cpus))
                result.runner.cores = format_cpu_list(cpus)
            result.threads = await runner.threads(threads)
            loaded = await runner.load(fetched.program, fetched.data)
            result.load.load_ns = loaded.load_ns
        return loaded

    async def _collect(self) -> None:
        """Run UPLOAD from the target to this machine, if the runner's files are not here; its time is not part of the pass."""
        assert self._runner is not None  # a pass has ended
        if self._runner.has_files:
            with self.phase("UPLOAD"):
                await self._runner.collect(self.report)

    def start_runner(self) -> AbstractAsyncContextManager[RemoteRunner]:
        """Start a fresh runner for the fetched program."""
        assert self._provisions is not None  # the program was fetched
        return self._attempt.target.start_runner(self._provisions.bundle, self.folder, self.take_log)

    def _share_s(self, runs: int, work_s: float) -> float:
        """Return the time in seconds that the next of `runs` remaining runs may take.

        Args:
            runs: number of runs that share the attempt's remaining time.
            work_s: time that each needs besides waiting for the device.
        """
        return self._attempt.share_s(runs, self._attempt.target.gates.longest_wait_s + work_s)

    async def wait(self, runs: int = 1, work_s: float = math.inf) -> list[report_pb2.GateWait]:
        """Run WAIT_FOR_COOL and WAIT_FOR_IDLE if necessary; they are phases of the result then.

        Args:
            runs: number of runs that share the attempt's remaining time.
            work_s: time that each of them needs besides waiting.
        """
        attempt, began_s, current = self._attempt, time.monotonic(), ""

        def report_wait(phase: str, message: str) -> None:
            nonlocal began_s, current
            is_new = current != phase
            if is_new and current:
                self.end_phase(current, began_s, time.monotonic())
            if is_new:
                began_s = time.monotonic()
            current = attempt.phase = phase
            self.report(message=message, force=is_new)

        waits = await attempt.target.gates.wait(report_wait, self._share_s(runs, work_s))
        if current:
            self.end_phase(current, began_s, time.monotonic())
        return waits
