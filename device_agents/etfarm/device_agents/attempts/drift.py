"""Step 7: a timed pass goes on where its times drift, so that a pace that changed once leaves it a median all the same.

A pass is at least so many iterations and so many seconds. In the shortest usual one, a second, a neighbour that goes or a clock
that steps leaves two halves and no one median. All samples are kept, and the verdict judges all of them as it judges any pass.
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

CALM: Final = 0.05
"""Drift up to which a pass has one median. Half of what the verdict allows by default: who measures until a limit is kept ends
near it, so this one is well within."""
DOUBLINGS: Final = 3
"""A pace that changes once, anywhere in the pass as it was asked for, is over within an eighth of one that was doubled three
times. That is less than half of its first third, so neither third's median sees it: what still drifts then goes on changing. Few
looks, so that a drift does not pass by luck."""
SETTLED: Final = "SETTLED"
DRIFTING: Final = "DRIFTING"
_LEAST_SAMPLES: Final = 30
_REPEATED: Final = 4
"""Times as long as what a pass took so far has to be left of the attempt's time: as long again for the pass, and both once more
for executing them again where outputs differ."""


def drift(samples_ns: array[int]) -> float | None:
    """How far the median of the last third lies from that of the first, as a part of it; None below 30 samples.

    Source: etfarm.server.reports.latency.statistics.drift, by which the verdict judges.
    """
    third = len(samples_ns) // 3
    if len(samples_ns) < _LEAST_SAMPLES:
        return None
    first, last = statistics.median(samples_ns[:third]), statistics.median(samples_ns[-third:])
    return last / first - 1 if first > 0 else None


async def measure(
    runner: Runner, plan: MeasurePlan, on_progress: OnProgress, left_s: Callable[[], float] = lambda: math.inf
) -> Measured:
    """The timed pass; where it drifts it is doubled, DOUBLINGS times at most, within the plan's limits.

    A pass without a least time has exactly its iterations. Where a pass went on, `stop_reason` is SETTLED, or DRIFTING where
    that did not help.

    Args:
        left_s: of the attempt's time.
    """
    measured = await runner.measure(plan, on_progress)
    went_on = False
    for _ in range(DOUBLINGS if plan.min_time_ns else 0):
        more = _as_long_again(plan, measured, left_s())
        # A million samples are sorted, and a heartbeat must not wait for that.
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
    found = drift(measured.samples_ns)
    return found is None or abs(found) <= CALM


def _as_long_again(plan: MeasurePlan, measured: Measured, left_s: float) -> MeasurePlan | None:
    """What doubles a pass; None where a limit stands against it."""
    left_ns, left = plan.max_time_ns - measured.duration_ns, plan.max_samples - measured.iterations
    if measured.stop_reason != "ENOUGH" or left_ns <= 0 or left <= 0 or left_s < _REPEATED * measured.duration_ns / 1e9:
        return None
    return replace(
        plan, warmup=0, steady=False, iterations=1, min_time_ns=measured.duration_ns, max_time_ns=left_ns, max_samples=left
    )  # fmt: skip
