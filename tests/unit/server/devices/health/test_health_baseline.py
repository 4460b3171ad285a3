"""Slower than itself: what is compared, and how often a device is suspected falsely, by simulation with a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from etfarm.server.devices.health import baseline
from etfarm.server.devices.health.baseline import BASELINE_RUNS, RECENT_RUNS, Pace

START = datetime(2026, 1, 1, tzinfo=UTC)
USUAL_NS = 33_000.0


def paces(values_ns: Sequence[float]) -> list[Pace]:
    return [Pace(START + timedelta(days=day), value_ns) for day, value_ns in enumerate(values_ns)]


def compared(values_ns: Sequence[float]) -> baseline.Comparison:
    comparison = baseline.compare(paces(values_ns))
    assert comparison is not None
    return comparison


def device(generator: random.Random, scatter: float, days: int, pace: Callable[[int], float] = lambda _: 1.0) -> list[Pace]:
    """Return a run a day of a device whose runs scatter; every 20th is slower by 5 to 30 %: something ran beside it."""
    values = []
    for day in range(days):
        disturbed = 1 + generator.uniform(0.05, 0.3) if generator.random() < 0.05 else 1.0
        values.append(USUAL_NS * pace(day) * disturbed * max(0.5, generator.gauss(1, scatter)))
    return paces(values)


def days_suspect(runs: Sequence[Pace]) -> list[int]:
    """Return the days on which the device was suspect."""
    days, is_slower = [], False
    for day in range(len(runs)):
        comparison = baseline.compare(runs[: day + 1])
        is_slower = comparison is not None and comparison.is_slower(was_slower=is_slower)
        if is_slower:
            days.append(day)
    return days


def test_a_device_is_judged_once_its_baseline_and_its_pace_are_known() -> None:
    few = paces([USUAL_NS] * (BASELINE_RUNS + RECENT_RUNS - 1))
    assert baseline.compare(few) is None
    assert baseline.usual_ns(few) == USUAL_NS
    assert baseline.usual_ns(few[: BASELINE_RUNS - 1]) is None


def test_the_reason_has_both_medians_and_the_day_on_which_it_began() -> None:
    comparison = compared([USUAL_NS] * 20 + [41_200.0] * 5)
    assert comparison.is_slower(was_slower=False)
    assert comparison.reason == "slower than itself: 41.2 us against 33 us, since 2026-01-21"


def test_four_slow_days_are_no_slowdown_and_five_are() -> None:
    assert not compared([USUAL_NS] * 20 + [60_000.0] * 4).is_slower(was_slower=False)
    assert compared([USUAL_NS] * 20 + [60_000.0] * 5).is_slower(was_slower=False)


def test_the_state_does_not_flap_at_the_limit() -> None:
    comparison = compared([USUAL_NS] * 20 + [USUAL_NS * 1.08] * 7)
    assert not comparison.is_slower(was_slower=False)
    assert comparison.is_slower(was_slower=True)
    assert not compared([USUAL_NS] * 20 + [USUAL_NS * 1.04] * 7).is_slower(was_slower=True)


def test_a_faster_device_is_no_problem() -> None:
    assert not compared([USUAL_NS] * 20 + [USUAL_NS / 2] * 20).is_slower(was_slower=True)


@pytest.mark.parametrize(("scatter", "devices", "most"), [(0.01, 100, 0), (0.03, 150, 2), (0.08, 100, 10)])
def test_a_steady_device_is_hardly_ever_suspected(scatter: float, devices: int, most: int) -> None:
    """A year of each device, judged every day."""
    generator = random.Random(20260601)
    suspected = 0
    for _ in range(devices):
        runs = device(generator, scatter, 365)
        first, days = runs[:BASELINE_RUNS], range(BASELINE_RUNS, 365 - RECENT_RUNS + 1)
        judged = (baseline.compare(first + runs[day : day + RECENT_RUNS]) for day in days)
        suspected += any(each is not None and each.is_slower(was_slower=False) for each in judged)
    assert suspected <= most, f"{suspected} of {devices} device years"


@pytest.mark.parametrize(("slowdown", "half_within", "all_within"), [(1.15, 6, 25), (1.2, 5, 8)])
def test_a_slowdown_is_detected_within_days(slowdown: float, half_within: int, all_within: int) -> None:
    generator = random.Random(7)
    delays = []
    for _ in range(50):
        days = days_suspect(device(generator, 0.03, 55, lambda day: slowdown if day >= 30 else 1.0))
        assert days and days[0] >= 30
        delays.append(days[0] - 29)
    assert sorted(delays)[len(delays) // 2] <= half_within
    assert max(delays) <= all_within


def test_a_repaired_device_is_good_again_within_days() -> None:
    days = days_suspect(device(random.Random(8), 0.03, 80, lambda day: 1.2 if 30 <= day < 50 else 1.0))
    assert days[0] in range(33, 39)
    assert days[-1] in range(50, 57)
    assert days == list(range(days[0], days[-1] + 1)), "in one go"
