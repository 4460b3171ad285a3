"""The times of rows: one estimator for all, and intervals that cover the truth in series like those of devices."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from etfarm.server.reports.trace.estimate import Estimator

Series = NDArray[np.float64]


def _correlated(random: np.random.Generator, size: int, correlation: float) -> Series:
    """Normal values with a standard deviation of 1, of which neighbours are correlated."""
    noise = random.normal(size=size)
    values = np.empty(size)
    values[0] = noise[0]
    for at in range(1, size):
        values[at] = correlation * values[at - 1] + np.sqrt(1 - correlation**2) * noise[at]
    return values


def _rows(random: np.random.Generator, size: int, correlation: float) -> list[Series]:
    """Rows of 20, 50 and 200 us: all follow the clock by 2 %, each varies by 3 %, and interruptions make iterations slow."""
    clock = 1 + 0.02 * _correlated(random, size, correlation)
    rows = [mean * clock * (1 + 0.03 * random.normal(size=size)) for mean in (20_000.0, 50_000.0, 200_000.0)]
    slow = random.random(size) < 0.05
    rows[2][slow] += random.exponential(2e6, size=int(slow.sum()))
    return rows


@pytest.mark.slow(reason="simulates 800 traced passes")
@pytest.mark.parametrize(("size", "correlation"), [(30, 0.0), (30, 0.5), (100, 0.0), (100, 0.6)])
def test_intervals_cover_the_mean_of_the_typical_iterations(size: int, correlation: float) -> None:
    random = np.random.default_rng(7)
    many = _rows(random, 200_000, 0.0)
    total = np.sum(many, axis=0)
    low, high = np.percentile(total, (25, 75))
    typical = (total >= low) & (total <= high)
    truth = [float(row[typical].mean()) for row in (*many, total)]
    covered, widths = np.zeros(4), np.zeros(4)
    trials = 200
    for _ in range(trials):
        rows = _rows(random, size, correlation)
        rows.append(np.sum(rows, axis=0))
        estimator = Estimator(rows[3])
        for at, row in enumerate(rows):
            half_width = estimator.half_width(row)
            assert half_width is not None
            covered[at] += abs(estimator.mean(row) - truth[at]) <= half_width
            widths[at] += half_width / truth[at] / trials
    assert (covered / trials >= 0.9).all(), covered / trials
    assert (widths < 0.05).all(), "an interval that covers everything says nothing"


def test_the_same_iterations_have_the_same_interval() -> None:
    rows = _rows(np.random.default_rng(1), 50, 0.3)
    first, second = (Estimator(np.sum(rows, axis=0)) for _ in range(2))
    assert [first.half_width(row) for row in rows] == [second.half_width(row) for row in rows]


def test_times_of_parts_add_up_to_that_of_the_whole() -> None:
    rows = _rows(np.random.default_rng(2), 40, 0.3)
    whole = np.sum(rows, axis=0)
    estimator = Estimator(whole)
    assert sum(estimator.mean(row) for row in rows) == pytest.approx(estimator.mean(whole))


def test_interrupted_iterations_count_neither_for_the_time_nor_for_its_interval() -> None:
    random = np.random.default_rng(3)
    calm = 100_000 + 500 * random.normal(size=40)
    disturbed = calm.copy()
    disturbed[[3, 17, 29]] += 5e6
    first, second = Estimator(calm), Estimator(disturbed)
    assert second.mean(disturbed) == pytest.approx(first.mean(calm), rel=0.005)
    width = second.half_width(disturbed)
    assert width is not None and width < 1000


@pytest.mark.parametrize("size", [1, 2, 5])
def test_few_iterations_have_no_interval(size: int) -> None:
    times = np.full(size, 1000.0)
    estimator = Estimator(times)
    assert (estimator.mean(times), estimator.half_width(times)) == (1000.0, None)


def test_equal_iterations_have_an_interval_without_width() -> None:
    times = np.full(30, 1000.0)
    assert Estimator(times).half_width(times) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("noise_us", [0.0, 0.02, 0.1, 0.3, 0.5, 1.0, 3.0])
def test_intervals_cover_what_a_microsecond_clock_rounds_away(noise_us: float) -> None:
    """The clock rounds down; each mean is half a step short then, which the REST has."""
    random, size, covered, widest, truths = np.random.default_rng(3), 60, 0, 0.0, np.linspace(4, 5, 101)
    for truth in truths:
        read = np.floor(truth + noise_us * random.normal(size=size)) * 1e3
        estimator = Estimator(50_000 + 500 * random.normal(size=size))
        half_width = estimator.half_width(read)
        assert half_width is not None
        half_width += estimator.rounding_error(read, 1e3)
        covered += abs(estimator.mean(read) + 500 - truth * 1e3) <= half_width + 1e-6
        widest = max(widest, half_width)
    assert covered >= 0.9 * len(truths)
    assert widest < (501 if noise_us == 0 else 1000 if noise_us < 1 else 1000 * noise_us)
