"""Interleaved candidates: alternating blocks in randomised order, over several starts of their processes.

A round has one block of timed iterations of each candidate. All runners of a start live at once and one of them computes while
the others wait at their pipes, so that changes of the device affect all of them alike. The placement of code and data in memory
makes a process faster or slower for its whole life, so all are restarted every few rounds.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from etfarm.device_agents.attempts.attempt import Attempt, Execution, Files
from etfarm.device_agents.attempts.cache import Lease
from etfarm.device_agents.attempts.passes import Passes, median_ns, plan_of
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.conditions.sampler import Watch
from etfarm.device_agents.conditions.telemetry import run_telemetry
from etfarm.device_agents.device.inventory import choose_cpus, format_cpu_list
from etfarm.device_agents.runners.errors import ProgramOutOfMemory
from etfarm.device_agents.runners.protocol import Measured, MeasurePlan
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.wire import timings

STARTS: Final = 8
"""Number of starts of the processes. In simulations with processes that differ by 1 %, 8 starts detect 3 % between two
programs in 19 of 20 cases, and report equal programs as different in at most 1 of 20; 5 starts detect it in 17 of 20."""
ROUNDS: Final = 5
"""Rounds per start. With the usual second for each candidate a block takes 25 ms, so that a short disturbance affects few."""
BLOCK_NS: Final = 20_000_000
"""Minimum time of a block: wake-up, and caches filled by other candidates, matter only within the first of its 20 ms."""
_PROBE_NS: Final = 5_000_000
"""Time at the end of a warm-up that shows how long an iteration takes."""


@dataclass(frozen=True)
class Rounds:
    """The layout of an attempt's rounds."""

    of_start: int
    """Rounds of each start."""
    iterations: tuple[int, ...]
    """Iterations of a block, by candidate."""


def layout(plan: MeasurePlan, medians_ns: Sequence[float]) -> Rounds:
    """Return rounds in which each candidate gets the plan's iterations and time in total, within its limits.

    Args:
        plan: the plan of one candidate.
        medians_ns: median time of an iteration, by candidate; above 0.
    """
    count = STARTS * ROUNDS
    block_ns = max(BLOCK_NS, plan.min_time_ns / count)
    most = max(1, plan.max_samples // count)
    iterations = [max(math.ceil(block_ns / median), math.ceil(plan.iterations / count)) for median in medians_ns]
    # Shorter blocks keep the time limit first, then fewer rounds; a block has at least one iteration.
    within = [max(1, int(plan.max_time_ns / count / median)) for median in medians_ns]
    chosen = tuple(min(wanted, most, limit) for wanted, limit in zip(iterations, within, strict=True))
    longest_ns = max(median * number for median, number in zip(medians_ns, chosen, strict=True))
    return Rounds(max(1, min(ROUNDS, int(plan.max_time_ns / STARTS / longest_ns))), chosen)


class Turns:
    """A candidate with its runner of the current start, and the blocks measured so far."""

    def __init__(self, execution: Execution, cpus: frozenset[int] | None, plan: MeasurePlan) -> None:
        self.execution = execution
        self.iterations = 0
        """Number of iterations in a block."""
        self.median_ns = 0.0
        """Median time of an iteration in ns, at the end of the first warm-up."""
        self.measured: Measured | None = None
        """All blocks as one pass."""
        self._cpus = cpus
        self._plan = plan
        self._blocks: list[agent_pb2.InterleavedBlock] = []
        self._opened = AsyncExitStack()
        self._runner: RemoteRunner | None = None
        self._method = ""
        self._executed = self._executed_ns = 0

    @property
    def live(self) -> bool:
        """Whether the candidate has not failed."""
        return not self.execution.result.HasField("error")

    @property
    def time_ns(self) -> int:
        """The total time of all blocks in ns."""
        return self.measured.duration_ns if self.measured else 0

    async def start(self, *, again: bool) -> None:
        """Start a fresh runner, load the program and warm it up."""
        self._runner = runner = await self._opened.enter_async_context(self.execution.start_runner())
        self._method = await self.execution.load(runner, self._cpus, into=agent_pb2.CandidateResult() if again else None)
        plan = replace(
            self._plan, max_warmup_ns=max(1, (self._plan.max_warmup_ns or self._plan.max_time_ns) // STARTS),
            iterations=1, min_time_ns=_PROBE_NS,
        )  # fmt: skip
        if again:
            warm = await runner.measure(plan)
        else:
            with self.execution.phase("WARMUP"):
                warm = await runner.measure(plan)
            self.median_ns = max(1.0, timings.median(warm.samples_ns))
            self.execution.result.load.first_run_ns = warm.first_run_ns
        result = self.execution.result
        self._executed, self._executed_ns = warm.warmup + warm.iterations, (warm.warmup_ns or 0) + warm.duration_ns
        result.warmup += self._executed
        result.warmup_ns += self._executed_ns
        if warm.steady is not None:
            result.steady = warm.steady and (result.steady or not again)

    async def block(self, number: int, start: int, place: int) -> None:
        """Measure one block, of the round `number`."""
        assert self._runner is not None  # `start` has run
        left_ns = max(1, self._plan.max_time_ns - self.time_ns)
        plan = MeasurePlan(
            warmup=0, iterations=self.iterations, min_time_ns=0, max_time_ns=left_ns, max_samples=self.iterations
        )  # fmt: skip
        measured = await self._runner.measure(plan)
        self._executed += measured.iterations
        self._executed_ns += measured.duration_ns
        self.measured = measured if self.measured is None else self.measured.joined(measured)
        block = agent_pb2.InterleavedBlock(round=number, process_pair=start, place=place, samples=measured.iterations)
        self._blocks.append(block)

    async def trace(self) -> Files:
        """Run the passes after the last block, in the same runner."""
        assert self._runner is not None and self.measured is not None
        passes = Passes(self._runner, self._method, self.execution.result, self.execution)
        passes.executed(self._executed, self._executed_ns)
        return await self.execution.trace(passes, self.measured.samples_ns)

    @property
    def pids(self) -> list[int]:
        """Process id of its runner, if there is one."""
        return [] if self._runner is None else [self._runner.pid]

    async def stop(self) -> None:
        """End its runner, if there is one."""
        self._runner = None
        opened, self._opened = self._opened, AsyncExitStack()
        await opened.aclose()

    def conclude(self, began_s: float, ended_s: float) -> None:
        """Fill the result with everything but telemetry and files."""
        execution, measured, plan = self.execution, self.measured, self._plan
        assert measured is not None
        execution.end_phase("TIMED", began_s, ended_s, p50_ns=median_ns(measured.samples_ns))
        result = execution.result
        result.blocks.extend(self._blocks)
        result.iterations, result.duration_ns = measured.iterations, measured.duration_ns
        if measured.peak_rss_bytes is not None:
            result.memory.peak_rss_bytes = measured.peak_rss_bytes
        is_enough = measured.iterations >= plan.iterations and measured.duration_ns >= plan.min_time_ns
        is_full = measured.iterations + self.iterations > plan.max_samples
        if is_enough:
            result.stop_reason = common_pb2.STOP_REASON_ENOUGH
        else:
            result.stop_reason = common_pb2.STOP_REASON_MAX_SAMPLES if is_full else common_pb2.STOP_REASON_MAX_TIME


@dataclass(frozen=True)
class _Begin:
    """The moment before the first block."""

    at_s: float
    cpu_ns: int | None
    """CPU time of the runners, as `Target.runners_cpu_ns` returns it."""


class InterleavedAttempt(Attempt):
    """An attempt whose candidates are measured in turns. If one fails, the others continue."""

    async def _carry_out(self, transfers: Transfers, lease: Lease) -> list[agent_pb2.CandidateResult]:
        measurement = self.start.measurement
        target = self.target
        cpus = choose_cpus(target.device, measurement.cores, target.restricted)
        plan = plan_of(measurement)
        executions = [
            Execution(self, candidate, transfers, lease, self.folder / str(index))
            for index, candidate in enumerate(self.start.candidates)
        ]
        turns = [Turns(execution, cpus, plan) for execution in executions]
        files: dict[str, Files] = {}
        try:
            for execution in executions:
                await execution.guarded(execution.fetch)
            if target.device.emulated:
                files = await self._measure(turns, plan, cpus)
            else:
                await self._wait(executions)
                with target.settings(cpus) as settings:
                    for execution in executions:
                        execution.result.telemetry.affinity = format_cpu_list(cpus or target.usable_cpus())
                        execution.result.telemetry.settings.extend(settings)
                    files = await self._measure(turns, plan, cpus)
        finally:
            # A second cancellation must not leave later candidates' runners behind: stopping them continues in the background.
            await asyncio.shield(asyncio.gather(*(each.stop() for each in turns)))
        for execution in executions:
            execution.measured()
        for execution in executions:
            if not self._broken(turns) and (candidate_files := files.get(execution.result.cell_id)) is not None:
                await execution.guarded(partial(execution.upload, candidate_files))
        for execution in executions:
            if self._broken(turns) is None and not execution.result.HasField("error"):
                await execution.numerics()
        if (broken := self._broken(turns)) is not None:
            for execution in executions:
                execution.result.error.CopyFrom(broken.execution.result.error)
        return [execution.result for execution in executions]

    async def _wait(self, executions: Sequence[Execution]) -> None:
        """Wait at the gates, once for all candidates."""
        waiting = next((each for each in executions if not each.result.HasField("error")), None)
        if waiting is None:
            return
        known = len(waiting.result.phases)

        async def wait() -> None:
            waiting.result.telemetry.waits.extend(await waiting.wait())

        await waiting.guarded(wait)
        for execution in executions:
            if execution is not waiting:
                execution.result.telemetry.waits.extend(waiting.result.telemetry.waits)
                execution.result.phases.extend(waiting.result.phases[known:])

    async def _measure(self, turns: Sequence[Turns], plan: MeasurePlan, cpus: frozenset[int] | None) -> dict[str, Files]:
        """Run everything from LOAD to the last pass; return the files to upload, by cell."""
        files: dict[str, Files] = {}
        async with self.target.watch(cpus) as watching:
            begin = await self._take_turns(turns, plan, watching)
            ended_s, used_ns = time.monotonic(), self._cpu_ns(turns)
            sampled = await watching.seen()
        self.target.gates.measured()
        for each in self._live(turns):
            if each.measured is None:
                continue
            each.conclude(begin.at_s, ended_s)
            telemetry = each.execution.result.telemetry
            telemetry.MergeFrom(run_telemetry(each.measured, sampled))
            if used_ns is not None and begin.cpu_ns is not None:
                telemetry.runners_cpu_ns = used_ns - begin.cpu_ns
        for each in self._live(turns):

            async def trace(each: Turns = each) -> None:
                files[each.execution.result.cell_id] = await each.trace()

            await self._guarded(turns, each, trace)
            await each.stop()
        return files

    async def _take_turns(self, turns: Sequence[Turns], plan: MeasurePlan, watching: Watch) -> _Begin:
        """Run all rounds and keep the runners of the last start; return the moment before the first block."""
        order, begin, number = random.Random(self.start.attempt_id), _Begin(0.0, 0), 0
        rounds: Rounds | None = None
        for start in range(STARTS):
            for each in self._live(turns):
                await each.stop()
            for each in self._live(turns):
                await self._guarded(turns, each, partial(each.start, again=start > 0))
            live = self._live(turns)
            if not live:
                break
            if rounds is None:
                rounds = layout(plan, [each.median_ns for each in live])
                for each, iterations in zip(live, rounds.iterations, strict=True):
                    each.iterations = iterations
                self.phase, begin = "TIMED", _Begin(time.monotonic(), self._cpu_ns(turns))
                watching.begin()
            of_start, is_last = 0, start == STARTS - 1
            while self._live(turns) and (of_start < rounds.of_start or (is_last and self._wants_more(turns, plan, of_start))):
                live = self._live(turns)
                order.shuffle(live)
                for place, each in enumerate(live):
                    await self._guarded(turns, each, partial(each.block, number, start, place))
                number, of_start = number + 1, of_start + 1
                for each in live:
                    total = max(number, STARTS * rounds.of_start)
                    each.execution.report_steps(number, total, f"round {number} of {total}")
                if any(each.time_ns >= plan.max_time_ns for each in self._live(turns)):
                    return begin
        return begin

    def _wants_more(self, turns: Sequence[Turns], plan: MeasurePlan, of_start: int) -> bool:
        """Return whether a candidate got too little time, because its iterations became shorter than estimated."""
        short = [each for each in self._live(turns) if each.time_ns < plan.min_time_ns]
        return bool(short) and of_start < 4 * ROUNDS and all(_has_room(each, plan) for each in self._live(turns))

    async def _guarded(self, turns: Sequence[Turns], each: Turns, work: Callable[[], Awaitable[None]]) -> None:
        """Do a part of one candidate's work; a failure ends this candidate only."""
        if not each.live or self._broken(turns) is not None:
            return

        async def part() -> None:
            try:
                await work()
            except BaseException:
                # End it before the fault is attributed: a hanging runner must not compute at the same time.
                await each.stop()
                raise

        if not await each.execution.guarded(part):
            error = each.execution.result.error
            if error.reason == ProgramOutOfMemory.reason and len(turns) > 1:
                together = f"The {len(turns)} candidates are in memory at once: without --interleave each has the device alone."
                error.remedy = f"{error.remedy} {together}".strip()

    def _cpu_ns(self, turns: Sequence[Turns]) -> int | None:
        return self.target.runners_cpu_ns([pid for each in turns for pid in each.pids])

    def _live(self, turns: Sequence[Turns]) -> list[Turns]:
        """Return the candidates that continue; none if the device itself failed."""
        return [] if self._broken(turns) is not None else [each for each in turns if each.live]

    def _broken(self, turns: Sequence[Turns]) -> Turns | None:
        return next((each for each in turns if each.execution.result.error.reason == "DEVICE_SELF_TEST_FAILED"), None)


def _has_room(each: Turns, plan: MeasurePlan) -> bool:
    measured = each.measured
    return measured is not None and measured.iterations + each.iterations <= plan.max_samples
