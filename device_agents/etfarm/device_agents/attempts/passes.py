"""The passes of a measurement over one loaded method: WARMUP and TIMED without tracing, then TRACED; and their comparison.

Passes are compared by their last outputs. Outputs are read only after the timed pass: reading them takes memory, which must not
be part of the timed pass's peak.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from etfarm.device_agents.attempts import drift, further, output_diff, repeats
from etfarm.device_agents.conditions.sampler import Watch
from etfarm.device_agents.conditions.telemetry import run_telemetry
from etfarm.device_agents.runners.protocol import Measured, MeasurePlan, Progress, Runner
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from etfarm.wire import timings
from etfarm.wire.tensors import Value
from etfarm.wire.words import value_of

_EQUAL: Final = report_pb2.REPEATABILITY_OUTCOME_EQUAL
_KEEPS_STATE: Final = report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE
_NONDETERMINISTIC: Final = report_pb2.REPEATABILITY_OUTCOME_NONDETERMINISTIC
_DIFFERENT: Final = report_pb2.REPEATABILITY_OUTCOME_DIFFERENT
_ROUNDING: Final = report_pb2.REPEATABILITY_OUTCOME_ROUNDING
_HIDDEN_STATE: Final = report_pb2.REPEATABILITY_OUTCOME_HIDDEN_STATE
_FIRST: Final = report_pb2.EXECUTION_FIRST
_TIMED_LAST: Final = report_pb2.EXECUTION_TIMED_LAST
_TRACED_LAST: Final = report_pb2.EXECUTION_TRACED_LAST
_REPEATED: Final = report_pb2.EXECUTION_REPEATED

_Pass = tuple[report_pb2.Execution.ValueType, int, list[Value]]
"""The last execution of a pass, the number of executions since loading, and its outputs."""

TRACED_ITERATIONS: Final = 30
"""Default minimum number of traced iterations. The times of operators are means over the middle half of them."""
SHORT_TRACED_ITERATIONS: Final = 100
"""Maximum number of traced iterations for SHORT_TRACED_NS: a trace has about 100 bytes for each event of each iteration."""
SHORT_TRACED_NS: Final = 100_000_000
"""Time to fill with traced iterations. Kernels of a small network are about as short as the resolution of the delegates' clocks,
a microsecond, so that only means over many iterations resolve them."""
SETTLED_TRACED_NS: Final = 20_000_000
"""Minimum duration of the traced pass. Its first milliseconds are slower: caches are cold, and threads have gone to sleep. A pass
of 100 iterations of 5 us consists of little else."""
MOST_TRACED_ITERATIONS: Final = 1000
"""Maximum number of traced iterations for SETTLED_TRACED_NS: reports contain the time of each."""
MAX_TRACED_NS: Final = 20_000_000_000
"""Limit of the traced pass, by the median of the timed one."""
MIN_TRACED_ITERATIONS: Final = 6
"""Number of iterations that are traced even beyond that limit: fewer have no interval."""
MAX_WARMUP_NS: Final = 10_000_000_000
"""Limit of a warm-up that ends when the median is steady. Clocks and caches settle within a second; heat takes minutes, and
shows in the drift of the timed pass."""
UNLIMITED_NS: Final = 7 * 86_400 * 1_000_000_000
"""A limit that is longer than any attempt."""
_AT_LEAST_NS: Final = 1_000_000_000


def plan_of(measurement: job_pb2.Measurement) -> MeasurePlan:
    """Return how long to measure in each run, with defaults for missing values; all runs together have the default `max_samples`.

    Without a number of warm-up iterations the warm-up continues until it is steady, for MAX_WARMUP_NS at most; a number is exact,
    and only `max_warmup_s` ends it earlier.
    """
    default, repeat = MeasurePlan(), repeats.repeat_of(measurement)
    counted = measurement.HasField("warmup")
    if measurement.HasField("max_warmup_s"):
        max_warmup_ns = max(1, round(measurement.max_warmup_s * 1e9))
    else:
        max_warmup_ns = UNLIMITED_NS if counted else MAX_WARMUP_NS
    return MeasurePlan(
        warmup=measurement.warmup if counted else default.warmup,
        steady=not counted,
        max_warmup_ns=max_warmup_ns,
        iterations=measurement.iterations if measurement.HasField("iterations") else default.iterations,
        min_time_ns=round(measurement.min_time_s * 1e9) if measurement.HasField("min_time_s") else default.min_time_ns,
        max_time_ns=max(1, round(measurement.max_time_s * 1e9)) if measurement.HasField("max_time_s") else default.max_time_ns,
        max_samples=measurement.max_samples if measurement.HasField("max_samples") else default.max_samples // repeat,
    )


def planned_s(plan: MeasurePlan) -> float:
    """Return the time in seconds that a plan asks for, as far as it is known before the program has run."""
    warmup_ns = (plan.max_warmup_ns or plan.max_time_ns) if plan.steady else 0
    return (warmup_ns + plan.min_time_ns) / 1e9


def traced_iterations(samples_ns: Sequence[int], minimum: int = TRACED_ITERATIONS) -> int:
    """Return the number of iterations to trace, from the timed samples, of which there is at least one.

    Args:
        samples_ns: the timed samples.
        minimum: the requested minimum, which is reduced only to end within MAX_TRACED_NS.
    """
    median_ns = max(1, sorted(samples_ns)[len(samples_ns) // 2])
    resolved = min(SHORT_TRACED_ITERATIONS, SHORT_TRACED_NS // median_ns)
    settled = min(MOST_TRACED_ITERATIONS, SETTLED_TRACED_NS // median_ns)
    wanted = max(minimum, resolved, settled)
    return min(wanted, max(MIN_TRACED_ITERATIONS, MAX_TRACED_NS // median_ns))


def median_ns(samples_ns: Sequence[int]) -> float | None:
    """Return the median of samples; None without samples."""
    return timings.median(samples_ns) if samples_ns else None


class PhaseListener(Protocol):
    """The receiver of a candidate's phases and progress."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Add a phase to the result, and report when it begins and when it ends."""

    def enter_phase(self, name: str) -> None:
        """Make another phase the current one; `end_phase` reports it."""

    def end_phase(self, name: str, began_s: float, ended_s: float, *, p50_ns: float | None = None) -> None:
        """Report a phase that has ended, by the monotonic clock, with the median of its samples if it has samples."""

    def report_steps(self, done: int, total: int) -> None:
        """Report how many of the current phase's steps are done."""


class Passes:
    """The passes over the method that is loaded, with its inputs set; they fill the result.

    Args:
        runner: a runner that has not executed the method since it was loaded.
        method: its name.
        result: gets everything but outputs and files.
        listener: receives phases and progress.
    """

    def __init__(self, runner: Runner, method: str, result: agent_pb2.CandidateResult, listener: PhaseListener) -> None:
        self._runner = runner
        self._method = method
        self._result = result
        self._listener = listener
        self.timed_s = 0.0
        """When the timed pass began, by the monotonic clock."""
        self._timed = 0
        """Number of executions from loading to the end of the timed pass."""
        self._repeat_limit_ns = 0
        """Time limit for repeating these executions, in ns."""

    async def measure(
        self, plan: MeasurePlan, watch: AbstractAsyncContextManager[Watch], left_s: Callable[[], float] = lambda: math.inf
    ) -> array[int]:
        """Run WARMUP and TIMED, which continues if its times drift; return the samples, and put all else into the result.

        Args:
            plan: how long to measure.
            watch: observes the device meanwhile.
            left_s: returns the attempt's remaining time in seconds.
        """
        listener, began_s = self._listener, time.monotonic()
        self.timed_s = 0.0
        async with watch as watching:

            def on_progress(progress: Progress) -> None:
                if progress.stage == "TIMED" and not self.timed_s:
                    self.timed_s = time.monotonic()
                    watching.begin()
                    listener.end_phase("WARMUP", began_s, self.timed_s)
                listener.enter_phase(progress.stage)
                listener.report_steps(progress.done, plan.warmup if progress.stage == "WARMUP" else plan.iterations)

            listener.enter_phase("WARMUP")
            measured = await drift.measure(self._runner, plan, on_progress, left_s)
            ended_s = time.monotonic()
            sampled = await watching.seen()
        self.timed_s = self.timed_s or began_s
        listener.end_phase("TIMED", self.timed_s, ended_s, p50_ns=median_ns(measured.samples_ns))
        self._take(measured)
        self._result.telemetry.MergeFrom(run_telemetry(measured, sampled))
        return measured.samples_ns

    async def compared_outputs(self, etdump: Path | None, iterations: int, *, writes_state: bool) -> list[Value]:
        """Return the outputs that references are compared with: those of the first execution after loading.

        With `etdump` this is the TRACED pass too. `outputs_equal` and `repeatability` say whether all passes agree: a program
        that keeps state returns something else in each execution, but the same again when it starts anew. If it writes to no
        state and does so, too, the last timed execution is compared: the first one is not an example of the others.

        Args:
            etdump: where to write the trace.
            iterations: number of traced iterations.
            writes_state: whether the method may write to state.
        """
        runner, listener = self._runner, self._listener
        last = await runner.outputs()
        lasts = [(_TIMED_LAST, self._timed, last)]
        if etdump is None:
            listener.enter_phase("OUTPUTS")
            await runner.load_method(self._method)
            await runner.run()
            first = await runner.outputs()
        else:
            with listener.phase("TRACED"):
                await runner.load_method(self._method, trace=True)
                await runner.run()
                first = await runner.outputs()
                # The timed pass has warmed the method up.
                traced = await runner.trace(
                    iterations, etdump, warmup=0, on_progress=lambda progress: listener.report_steps(progress.done, iterations)
                )
                self._result.traced_ns.extend(traced.samples_ns)
                if traced.wall_ns is not None:
                    self._result.traced_telemetry.CopyFrom(run_telemetry(traced))
                lasts.insert(0, (_TRACED_LAST, 1 + iterations, await runner.outputs()))
        listener.enter_phase("OUTPUTS")
        repeatability = await self._repeatability(first, lasts)
        if repeatability.outcome == _KEEPS_STATE and not writes_state:
            repeatability.outcome = _HIDDEN_STATE
        self._result.repeatability.CopyFrom(repeatability)
        if repeatability.outcome != _DIFFERENT:
            self._result.outputs_equal = repeatability.outcome in {_EQUAL, _KEEPS_STATE}
        return last if repeatability.outcome == _HIDDEN_STATE else first

    async def execute_further(
        self, files: Sequence[Path], first: Sequence[Value], limit_s: float, *, writes_state: bool
    ) -> further.Further:
        """Execute the method once on the inputs of each file, after all other passes; see `further.execute`."""
        # State that is written where the inputs say gives equal outputs for equal inputs, and others for the next ones.
        keeps_state = writes_state or self._result.repeatability.outcome != _EQUAL
        return await further.execute(self._runner, self._method, files, first, keeps_state=keeps_state, limit_s=limit_s)

    def _take(self, measured: Measured) -> None:
        result = self._result
        result.warmup, result.iterations = measured.warmup, measured.iterations
        result.duration_ns, result.stop_reason = measured.duration_ns, value_of(common_pb2.StopReason, measured.stop_reason)
        result.load.first_run_ns = measured.first_run_ns
        if measured.steady is not None:
            result.steady = measured.steady
        if measured.warmup_ns is not None:
            result.warmup_ns = measured.warmup_ns
        if measured.peak_rss_bytes is not None:
            result.memory.peak_rss_bytes = measured.peak_rss_bytes
        self.executed(measured.warmup + measured.iterations, (measured.warmup_ns or 0) + measured.duration_ns)

    def executed(self, executions: int, duration_ns: int) -> None:
        """Note how often and how long the method was executed since it was loaded, if `measure` did not do it."""
        self._timed = executions
        self._repeat_limit_ns = 2 * duration_ns + _AT_LEAST_NS

    async def _repeatability(self, first: list[Value], lasts: Sequence[_Pass]) -> report_pb2.Repeatability:
        """Return whether the passes agree, and if not, why: repeat the shortest one that differs from `first`.

        Args:
            first: outputs of the first execution after loading.
            lasts: passes by name, with the number of executions since loading and the last one's outputs; shortest first.
        """
        differing = [each for each in lasts if not output_diff.equal(first, each[2])]
        if not differing:
            return report_pb2.Repeatability(outcome=_EQUAL)
        runner = self._runner
        await runner.load_method(self._method)
        await runner.run()
        again = await runner.outputs()
        reproduced = output_diff.equal(first, again)
        repeated = await _compare(first, again, (_FIRST, _REPEATED))
        if not output_diff.is_rounding(repeated):
            return report_pb2.Repeatability(outcome=_NONDETERMINISTIC, differences=repeated)
        name, executions, last = differing[0]
        differences = await _compare(first, last, (_FIRST, name))
        if executions > 1:
            plan = MeasurePlan(
                warmup=0, iterations=executions - 1, min_time_ns=0, max_time_ns=self._repeat_limit_ns, max_samples=executions
            )  # fmt: skip
            done = (await runner.measure(plan)).iterations
            again = await runner.outputs()
            if done < executions - 1:
                outcome = _ROUNDING if output_diff.is_rounding(differences) else _DIFFERENT
                return report_pb2.Repeatability(outcome=outcome, differences=differences)
        reproduced = reproduced and output_diff.equal(last, again)
        repeated = await _compare(last, again, (name, _REPEATED))
        if not output_diff.is_rounding(repeated):
            return report_pb2.Repeatability(outcome=_NONDETERMINISTIC, differences=repeated)
        # State that changes an output by a rounding error is still state if the same executions reproduce each bit.
        is_rounding = not reproduced and output_diff.is_rounding(differences)
        return report_pb2.Repeatability(outcome=_ROUNDING if is_rounding else _KEEPS_STATE, differences=differences)


async def _compare(
    first: Sequence[Value], second: Sequence[Value], executions: output_diff.Executions
) -> list[report_pb2.OutputDifference]:
    # Outputs may have millions of elements, and a heartbeat must not wait for them.
    return await asyncio.to_thread(output_diff.compare, first, second, executions)
