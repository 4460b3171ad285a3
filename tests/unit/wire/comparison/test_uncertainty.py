"""The interval of a ratio of separate runs, against a known truth."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from etfarm.v1 import comparison_pb2
from etfarm.wire import timings
from etfarm.wire.comparison import latency, uncertainty
from etfarm.wire.words import word_of
from tests.support.comparisons import timed

TRIALS = 2000
Draw = Callable[[random.Random], float]
"""The deviation of one run's median from the true one, on a logarithmic scale."""


def normal(stddev: float) -> Draw:
    return lambda chance: chance.gauss(0, stddev)


def with_outliers(chance: random.Random) -> float:
    """Return times of runs, of which one in ten is disturbed and slower by up to a quarter."""
    return chance.gauss(0, 0.01) + (chance.random() < 0.1) * chance.uniform(0.05, 0.25)


def by_layout(chance: random.Random) -> float:
    """Return times of processes: each has one of two layouts in memory for its lifetime."""
    return chance.gauss(0, 0.005) + chance.choice((0.0, 0.1))


def heavy_tailed(chance: random.Random) -> float:
    """Student's distribution with 3 degrees of freedom."""
    return 0.01 * chance.gauss(0, 1) / math.sqrt(chance.gammavariate(1.5, 2) / 3)


def of_runs(chance: random.Random, draw: Draw, runs: int, truth: float = 1.0) -> dict[str, Any]:
    """Return the part of a report that is read, of several runs; complete ones take too long to build in thousands."""
    logs = [math.log(1e6 * truth) + draw(chance) for _ in range(runs)]
    return {
        "latency": {"p50_ns": math.exp(statistics.fmean(logs))},
        "run_spread": {"source": "REPEATS", "runs": runs, "relative_stddev": stddev_of(logs)},
    }


def stddev_of(logs: Sequence[float]) -> float:
    """Return the sample standard deviation; that of `statistics` computes with fractions, which takes too long."""
    mean = statistics.fmean(logs)
    return math.sqrt(sum((each - mean) ** 2 for each in logs) / (len(logs) - 1))


def of_history(chance: random.Random, draw: Draw, runs: int, truth: float = 1.0) -> dict[str, Any]:
    """Return a single run, and the spread of others before it."""
    stddev = stddev_of([draw(chance) for _ in range(runs)])
    p50_ns = 1e6 * truth * math.exp(draw(chance))
    return {
        "latency": {"p50_ns": p50_ns, "p50_ci95_ns": [p50_ns * 0.999, p50_ns * 1.001]},
        "run_spread": {"source": "HISTORY", "runs": runs, "relative_stddev": stddev},
    }


def intervals(base: Callable[[random.Random], Any], candidate: Callable[[random.Random], Any]) -> list[tuple[float, float]]:
    chance, ends = random.Random(0), []
    for _ in range(TRIALS):
        sides = uncertainty.estimate(base(chance)), uncertainty.estimate(candidate(chance))
        assert sides[0] is not None and sides[1] is not None
        interval = uncertainty.interval(*sides)
        assert interval is not None
        ends.append(interval)
    return ends


def share(intervals: list[tuple[float, float]], holds: Callable[[float, float], bool]) -> float:
    return sum(holds(*ends) for ends in intervals) / len(intervals)


@pytest.mark.parametrize("runs", [(3, 3), (5, 5), (3, 10), (20, 20)])
@pytest.mark.parametrize("stddevs", [(0.02, 0.02), (0.005, 0.05)])
def test_the_interval_of_repeated_runs_covers_the_true_ratio(runs: tuple[int, int], stddevs: tuple[float, float]) -> None:
    truth = 1.05
    results = intervals(
        lambda chance: of_runs(chance, normal(stddevs[0]), runs[0]),
        lambda chance: of_runs(chance, normal(stddevs[1]), runs[1], truth),
    )
    assert 0.93 <= share(results, lambda low, high: low <= math.log(truth) <= high) <= 0.985


@pytest.mark.parametrize("runs", [(5, 5), (20, 20), (4, 50)])
def test_the_interval_of_single_runs_with_a_history_covers_the_true_ratio(runs: tuple[int, int]) -> None:
    results = intervals(
        lambda chance: of_history(chance, normal(0.02), runs[0]), lambda chance: of_history(chance, normal(0.02), runs[1], 1.05)
    )
    assert 0.93 <= share(results, lambda low, high: low <= math.log(1.05) <= high) <= 0.98


def test_repeats_are_compared_with_a_single_run_that_has_a_history() -> None:
    results = intervals(lambda chance: of_history(chance, normal(0.02), 10), lambda chance: of_runs(chance, normal(0.02), 5))
    assert 0.93 <= share(results, lambda low, high: low <= 0 <= high) <= 0.98


@pytest.mark.parametrize("draw", [normal(0.001), normal(0.02), normal(0.2), with_outliers, by_layout, heavy_tailed])
@pytest.mark.parametrize("runs", [3, 5, 10])
def test_equal_programs_are_rarely_outside_of_the_interval(draw: Draw, runs: int) -> None:
    results = intervals(lambda chance: of_runs(chance, draw, runs), lambda chance: of_runs(chance, draw, runs))
    assert share(results, lambda low, high: low > 0 or high < 0) <= 0.065


def outcomes(draw: Draw, truth: float, *, max_spread: float = math.inf) -> list[str]:
    """Return the outcomes of comparisons of 5 runs with 5 whose reported spreads are at most `max_spread`."""
    chance, results = random.Random(0), []
    for _ in range(TRIALS):
        sides = of_runs(chance, draw, 5), of_runs(chance, draw, 5, truth)
        if all(side["run_spread"]["relative_stddev"] <= max_spread for side in sides):
            ratio = latency.separate(*sides)
            assert ratio is not None
            results.append(word_of(comparison_pb2.LatencyOutcome.DESCRIPTOR, latency.outcome(ratio)) or "")
    return results


def test_five_repeats_show_five_percent_if_runs_vary_by_at_most_two() -> None:
    results = outcomes(normal(0.02), 1.05, max_spread=0.02)
    assert len(results) > TRIALS / 4
    assert results.count("slower") >= 0.9 * len(results)
    results = outcomes(normal(0.015), 1.05)
    assert results.count("slower") >= 0.95 * len(results)


@pytest.mark.parametrize("draw", [normal(0.04), normal(0.2), with_outliers, by_layout, heavy_tailed])
def test_a_difference_of_unsteady_runs_is_inconclusive_within_the_wider_interval(draw: Draw) -> None:
    results = outcomes(draw, 1.0)
    assert results.count("slower") + results.count("faster") <= 0.045 * len(results)
    if draw is not heavy_tailed:
        assert "inconclusive" in results


def test_runs_that_vary_by_a_fifth_do_not_show_five_percent() -> None:
    results = outcomes(normal(0.2), 1.05)
    assert results.count("slower") + results.count("faster") <= 0.05 * len(results)


@pytest.mark.parametrize(
    "spread",
    [None, {"source": "PRIOR", "runs": 50, "relative_stddev": 0.03}, {"source": "HISTORY", "runs": 2, "relative_stddev": 0.03},
     {"source": "REPEATS", "runs": 2, "relative_stddev": 0.03}, {"relative_stddev": 0.03, "runs": 9}],
)  # fmt: skip
def test_a_spread_of_other_programs_or_of_few_runs_is_an_assumption(spread: dict[str, Any] | None) -> None:
    estimate = uncertainty.estimate(timed("k", 1e6, (0.99e6, 1.01e6), run_spread=spread))
    assert estimate is not None and not estimate.is_observed and estimate.variances is not None
    assert estimate.variances[0] == pytest.approx(0.03**2 if spread else (math.log(1 / 0.99) / timings.NORMAL_QUANTILE) ** 2)


def test_without_any_known_variation_there_is_no_interval() -> None:
    bare, known = (uncertainty.estimate(each) for each in (timed("k", 1e6), timed("b", 1e6, (0.99e6, 1.01e6))))
    assert bare is not None and known is not None
    assert uncertainty.interval(bare, known) is uncertainty.interval(known, bare) is None
    assert uncertainty.estimate(timed("z", 0.0)) is None


@pytest.mark.parametrize("stddev", [1e-200, 1e-160, 1e160, 1e300])
def test_extreme_spreads_are_computed_without_an_exception(stddev: float) -> None:
    spread = {"source": "HISTORY", "runs": 9, "relative_stddev": stddev}
    estimate = uncertainty.estimate(timed("k", 1e6, run_spread=spread))
    assert estimate is not None
    interval = uncertainty.interval(estimate, estimate)
    assert interval is None or not interval[0] > 0
