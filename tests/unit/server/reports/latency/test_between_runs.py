"""The spread between runs, held against known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.latency import between_runs, statistics
from etfarm.server.reports.latency.between_runs import Median, Spread

TIMES = st.floats(1.0, 1e12)


def run_of(random: np.random.Generator, median_ns: float, stddev: float) -> Median:
    samples = (median_ns * np.exp(random.normal(0, stddev, 60))).astype(np.int64)
    return Median(float(np.median(samples)), statistics.median_interval(samples))


@pytest.mark.parametrize("count", [3, 5, 10])
@pytest.mark.parametrize("between", [0.0, 0.01, 0.05])
def test_the_interval_covers_the_median_over_runs(count: int, between: float) -> None:
    random, truth, covered, trials = np.random.default_rng(count), 1e6, 0, 150
    for _ in range(trials):
        runs = [run_of(random, truth * math.exp(random.normal(0, between)), 0.05) for _ in range(count)]
        spread = between_runs.spread_of([run.p50_ns for run in runs], between_runs.mean_error(runs))
        assert spread is not None
        low, high = between_runs.interval(between_runs.middle(runs), spread, count)
        covered += low <= truth <= high
    assert covered >= 0.9 * trials


def test_the_history_of_other_runs_covers_a_single_run() -> None:
    random, truth, covered, trials = np.random.default_rng(0), 1e6, 0, 300
    for _ in range(trials):
        earlier = truth * np.exp(random.normal(0, 0.03, 6))
        spread = between_runs.spread_of(earlier.tolist())
        assert spread is not None
        low, high = between_runs.interval(truth * math.exp(random.normal(0, 0.03)), spread, 1)
        covered += low <= truth <= high
    assert 0.92 * trials <= covered <= 0.98 * trials


def test_a_pooled_spread_is_that_of_its_groups_whatever_their_medians() -> None:
    random = np.random.default_rng(2)
    groups = [tuple(median * np.exp(random.normal(0, 0.04, 10))) for median in (1.1e6, 5e6, 9e6)]
    spread = between_runs.pooled([*groups, (3e6,)], 2e6)
    assert spread.stddev == pytest.approx(0.04, rel=0.3) and (spread.runs, spread.freedom) == (30, 27)


@pytest.mark.parametrize(("p50_ns", "expected"), [(1e3, 0.05), (999_999.0, 0.05), (1e6, 0.03), (1e10, 0.03)])
def test_without_enough_other_runs_a_constant_is_assumed(p50_ns: float, expected: float) -> None:
    spread = between_runs.pooled([(1.0, 1.0, 1.0), (2.0, 2.0)], p50_ns)
    assert spread == Spread(expected, 0, math.inf)
    low, high = between_runs.interval(p50_ns, spread, 1)
    assert high / p50_ns == pytest.approx(p50_ns / low) == pytest.approx(math.exp(1.96 * expected), rel=1e-3)


def test_few_runs_that_agree_by_chance_claim_no_smaller_spread_than_their_samples_allow() -> None:
    runs = [Median(1e6, (0.97e6, 1.03e6))] * 3
    spread = between_runs.spread_of([run.p50_ns for run in runs], between_runs.mean_error(runs))
    assert spread is not None and spread.stddev == pytest.approx(0.03 / 1.96, rel=0.01)
    low, high = between_runs.interval(1e6, spread, 3)
    assert high / low > 1.03 / 0.97, "three runs are not enough to say more than each of them"


@given(st.lists(TIMES, max_size=2))
def test_two_runs_have_no_spread(medians: list[float]) -> None:
    assert between_runs.spread_of(medians) is None


@given(st.lists(TIMES, min_size=3, max_size=50))
def test_the_interval_contains_the_middle_which_lies_between_the_medians(medians: list[float]) -> None:
    middle, spread = between_runs.middle([Median(each) for each in medians]), between_runs.spread_of(medians)
    assert min(medians) * (1 - 1e-9) <= middle <= max(medians) * (1 + 1e-9) and spread is not None
    low, high = between_runs.interval(middle, spread, len(medians))
    assert 0 <= low <= middle <= high


def test_within_runs_the_errors_of_several_medians_average_out() -> None:
    one = Median(1e6, (0.98e6, 1.02e6))
    assert between_runs.within(1e6, [one]) == (0.98e6, 1.02e6)
    four = between_runs.within(1e6, [one] * 4)
    assert four is not None and four[1] - four[0] == pytest.approx(0.02e6, rel=0.01)
    assert between_runs.within(1e6, [one, Median(1e6)]) is None
