"""Drift of a timed pass: a drifting pass is continued, so that one change of pace does not split its median.

A pass has a minimum number of iterations and a minimum time. In the shortest usual pass, one second, another process that ends or
a clock step leaves two halves without a common median. All samples are kept, and the verdict judges them as in any pass.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from etfarm.device_agents.runners.protocol import Measured, MeasurePlan, OnProgress, Progress, Runner
from etfarm.wire import timings

CALM: Final = 0.05
"""Drift up to which a pass has one median. It is half of what the verdict allows by default: a pass measured until it meets a
limit ends close to it, so this limit leaves a margin."""
DOUBLINGS: Final = 3
"""Maximum number of doublings. A single change of pace in the original pass lies within the first eighth of a pass that was
doubled three times. That is less than half of its first third, so neither third's median contains it: a drift that remains
is a continuing one. Few checks, so that a drift does not pass by chance."""
SETTLED: Final = "SETTLED"
DRIFTING: Final = "DRIFTING"
_REPEATED: Final = 4
"""Multiple of the pass's duration that must be left of the attempt's time: once for the pass, and twice for executing both
again if outputs differ."""


def drift(samples_ns: array[int]) -> float | None:
    """Return the drift of a pass's times, by the verdict's rule. See `etfarm.wire.timings.drift`."""
    return timings.drift(samples_ns, timings.median)


async def measure(
    runner: Runner, plan: MeasurePlan, on_progress: OnProgress, left_s: Callable[[], float] = lambda: math.inf
) -> Measured:
    """Run the timed pass; if it drifts, double it, DOUBLINGS times at most, within the plan's limits.

    A pass without a minimum time has exactly its iterations. If a pass was doubled, `stop_reason` is SETTLED, or DRIFTING if
    that did not help.

    Args:
        runner: has the method loaded and its inputs set.
        plan: how long to measure.
        on_progress: takes the progress of the whole pass.
        left_s: returns the attempt's remaining time in seconds.
    """
    measured = await runner.measure(plan, on_progress)
    is_extended = False
    for _ in range(DOUBLINGS if plan.min_time_ns else 0):
        more = _as_long_again(plan, measured, left_s())
        # Sorting a million samples takes long, and a heartbeat must not wait for it.
        if more is None or await asyncio.to_thread(_is_calm, measured):
            break
        done = measured.iterations

        def on_more(progress: Progress, done: int = done) -> None:
            on_progress(replace(progress, done=done + progress.done))

        further = await runner.measure(more, on_more)
        measured, is_extended = replace(measured.joined(further), stop_reason=further.stop_reason), True
    if not is_extended:
        return measured
    if await asyncio.to_thread(_is_calm, measured):
        return replace(measured, stop_reason=SETTLED)
    return replace(measured, stop_reason=DRIFTING) if measured.stop_reason == "ENOUGH" else measured


def _is_calm(measured: Measured) -> bool:
    change = drift(measured.samples_ns)
    return change is None or abs(change) <= CALM


def _as_long_again(plan: MeasurePlan, measured: Measured, left_s: float) -> MeasurePlan | None:
    """Return the plan that doubles a pass; None if a limit forbids it."""
    left_ns, quota = plan.max_time_ns - measured.duration_ns, plan.max_samples - measured.iterations
    if measured.stop_reason != "ENOUGH" or left_ns <= 0 or quota <= 0 or left_s < _REPEATED * measured.duration_ns / 1e9:
        return None
    return replace(
        plan, warmup=0, steady=False, iterations=1, min_time_ns=measured.duration_ns, max_time_ns=left_ns, max_samples=quota
    )  # fmt: skip
