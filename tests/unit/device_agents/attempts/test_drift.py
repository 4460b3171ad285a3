"""A timed pass goes on where its times drift: long enough for a pace that changed once, and never beyond its limits."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.attempts import drift
from etfarm.device_agents.attempts.passes import Passes
from etfarm.device_agents.conditions.sampler import Sampler, watched
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.protocol import Measured, MeasurePlan, OnProgress, Progress
from etfarm.server.reports.latency import statistics
from etfarm.v1 import agent_pb2, common_pb2, report_pb2
from tests.support.phases import RecordedPhases
from tests.support.programs import program
from tests.support.runner import loaded, runner_bundle

__all__ = ["runner_bundle"]

SECOND = 1_000_000_000
PLAN = MeasurePlan(min_time_ns=SECOND, steady=True)


class Paced:
    """A runner in a time of its own, whose iterations take what `pace` says: nanoseconds, of those since its first pass."""

    def __init__(self, pace: Callable[[int], int]) -> None:
        self._pace = pace
        self._now_ns = 0
        self.plans: list[MeasurePlan] = []

    async def measure(self, plan: MeasurePlan, on_progress: OnProgress | None = None) -> Measured:
        self.plans.append(plan)
        samples, began_ns, reason = array("q"), self._now_ns, ""
        while not reason:
            samples.append(self._pace(self._now_ns))
            self._now_ns += samples[-1]
            took_ns = self._now_ns - began_ns
            if len(samples) >= plan.iterations and took_ns >= plan.min_time_ns:
                reason = "ENOUGH"
            elif len(samples) >= plan.max_samples:
                reason = "MAX_SAMPLES"
            elif took_ns >= plan.max_time_ns:
                reason = "MAX_TIME"
        if on_progress is not None:
            on_progress(Progress("TIMED", len(samples), took_ns))
        return Measured(plan.warmup, 5, len(samples), took_ns, reason, took_ns, took_ns, 0, 0, 0, 0, 0, 100, samples, 7, True)


async def paced(pace: Callable[[int], int], plan: MeasurePlan = PLAN, left_s: float = 1e9) -> tuple[Measured, list[MeasurePlan]]:
    """Return what is measured at a pace, and the passes that it took."""
    runner = Paced(pace)
    return await drift.measure(runner, plan, lambda progress: None, lambda: left_s), runner.plans  # type: ignore[arg-type]


@given(st.floats(0, 1), st.floats(0.5, 2))
async def test_a_pace_that_changes_once_leaves_a_median_of_the_one_that_lasted(at: float, change: float) -> None:
    after = round(1_000_000 * change)
    measured, plans = await paced(lambda now_ns: after if now_ns > at * SECOND else 1_000_000)
    result = drift.drift(measured.samples_ns)
    assert result is not None and abs(result) <= drift.CALM
    assert measured.duration_ns < 8.1 * SECOND
    assert measured.stop_reason == ("SETTLED" if len(plans) > 1 else "ENOUGH")
    if len(plans) > 1:
        assert sorted(measured.samples_ns)[measured.iterations // 2] == after
    assert (measured.warmup, measured.warmup_ns, measured.steady) == (10, 7, True), "of the only warm-up"


async def test_times_that_keep_changing_are_measured_eight_times_as_long_and_reported() -> None:
    measured, plans = await paced(lambda now_ns: 1_000_000 + now_ns // 5_000)
    assert (measured.stop_reason, len(plans)) == ("DRIFTING", 4)
    assert 8 * SECOND <= measured.duration_ns < 8.1 * SECOND
    assert measured.iterations == len(measured.samples_ns) and sum(measured.samples_ns) == measured.duration_ns
    assert [(plan.warmup, plan.steady) for plan in plans] == [(10, True), (0, False), (0, False), (0, False)]


@pytest.mark.parametrize(("plan", "left_s", "reason", "passes"), [
    (replace(PLAN, max_time_ns=3 * SECOND), 1e9, "MAX_TIME", 3),
    (replace(PLAN, max_samples=900), 1e9, "MAX_SAMPLES", 2),
    (PLAN, 7.0, "DRIFTING", 2),
    (PLAN, 3.9, "ENOUGH", 1),
    (replace(PLAN, min_time_ns=0, iterations=100), 1e9, "ENOUGH", 1),
])  # fmt: skip
async def test_no_limit_is_passed_for_it(plan: MeasurePlan, left_s: float, reason: str, passes: int) -> None:
    measured, plans = await paced(lambda now_ns: 1_000_000 + now_ns // 2_000, plan, left_s)
    assert (measured.stop_reason, len(plans)) == (reason, passes)
    assert measured.iterations <= plan.max_samples and measured.duration_ns < plan.max_time_ns + 10**8


async def test_calm_times_are_measured_once() -> None:
    measured, plans = await paced(lambda now_ns: 1_000_000 + now_ns % 7_000)
    assert (measured.stop_reason, plans) == ("ENOUGH", [PLAN])


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=100))
def test_it_is_the_drift_that_the_verdict_judges_by(samples: list[int]) -> None:
    judged = statistics.drift(np.array(samples, np.int64))
    assert drift.drift(array("q", samples)) == (None if judged is None else pytest.approx(judged))


async def test_a_real_pass_that_is_continued_is_reported_as_one_pass(
    runner_bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "CALM", -1.0)  # nothing is calm enough
    result, received = agent_pb2.CandidateResult(), RecordedPhases()
    done: list[int] = []
    monkeypatch.setattr(received, "report_steps", lambda count, total: done.append(count))
    async with NativeRunner.start(runner_bundle.command(), tmp_path) as runner:
        await runner.threads(1)
        await loaded(runner, program("counter"))
        passes = Passes(runner, "forward", result, received)
        samples = await passes.measure(replace(PLAN, steady=False, min_time_ns=20_000_000), watched(lambda: Sampler([])))
        await passes.compared_outputs(None, 1, writes_state=True)
    # A machine that stands still in the first pass makes the others so long that the samples are full.
    assert (
        result.stop_reason in {common_pb2.STOP_REASON_DRIFTING, common_pb2.STOP_REASON_MAX_SAMPLES}
        and result.duration_ns >= 160_000_000
    )
    assert len(samples) == result.iterations and done == sorted(done)
    assert received.phases == ["WARMUP", "TIMED"]
    assert result.telemetry.wall_time_ns >= result.duration_ns
    assert result.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE, "all of its executions are repeated"
