"""Drift of a timed pass: a pass whose times drift continues, so that it has one median although the pace changed once.

A pass has a minimum number of iterations and a minimum time. In the shortest usual pass, one second, a neighbour that ends or a
clock that steps leaves two halves without a common median. All samples are kept, and the verdict judges them as in any pass.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from etfarm.device_agents.runners.protocol import Measured, MeasurePlan, OnProgress, Progress, Runner
from etfarm.wire import timings

CALM: Final = 0.05
"""Drift up to which a pass has one median. Half of what the verdict allows by default: who measures until a limit is kept ends
near it, so this one is well within."""
DOUBLINGS: Final = 3
"""A pace that changes once, anywhere in the pass as it was asked for, is over within an eighth of one that was doubled three
times. That is less than half of its first third, so neither third's median sees it: what still drifts then goes on changing. Few
looks, so that a drift does not pass by luck."""
SETTLED: Final = "SETTLED"
DRIFTING: Final = "DRIFTING"
_REPEATED: Final = 4
"""Times as long as what a pass took so far has to be left of the attempt's time: as long again for the pass, and both once more
for executing them again where outputs differ."""


def drift(samples_ns: array[int]) -> float | None:
    """Return how far the times of a pass moved, by the verdict's rule. See `etfarm.wire.timings.drift`."""
    return timings.drift(samples_ns, statistics.median)


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
        left_s: returns what is left of the attempt's time.
    """
    measured = await runner.measure(plan, on_progress)
    went_on = False
    for _ in range(DOUBLINGS if plan.min_time_ns else 0):
        more = _as_long_again(plan, measured, left_s())
        # Sorting a million samples takes long, and a heartbeat must not wait for it.
        if more is None or await asyncio.to_thread(_is_calm, measured):
            break
        done = measured.iterations

        def on_more(progress: Progress, done: int = done) -> None:
            on_progress(replace(progress, done=done + progress.done))

        further = await runner.measure(more, on_more)
        measured, went_on = replace(measured.joined(further), stop_reason=further.stop_reason), True
    if not went_on:
        return measured
    if await asyncio.to_thread(_is_calm, measured):
        return replace(measured, stop_reason=SETTLED)
    return replace(measured, stop_reason=DRIFTING) if measured.stop_reason == "ENOUGH" else measured


def _is_calm(measured: Measured) -> bool:
    change = drift(measured.samples_ns)
    return change is None or abs(change) <= CALM


def _as_long_again(plan: MeasurePlan, measured: Measured, left_s: float) -> MeasurePlan | None:
    """Return the plan that doubles a pass; None if a limit forbids it."""
    left_ns, left = plan.max_time_ns - measured.duration_ns, plan.max_samples - measured.iterations
    if measured.stop_reason != "ENOUGH" or left_ns <= 0 or left <= 0 or left_s < _REPEATED * measured.duration_ns / 1e9:
        return None
    return replace(
        plan, warmup=0, steady=False, iterations=1, min_time_ns=measured.duration_ns, max_time_ns=left_ns, max_samples=left
    )  # fmt: skip
