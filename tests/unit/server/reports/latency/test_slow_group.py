"""Whether a pass has two paces: what interrupts many iterations is found, and wide or rounded times are one group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from etfarm.server.reports.latency import slow_group

MEDIAN = 1_000_000.0
TRIALS = 200


def interrupted(random: np.random.Generator, count: int, share: float, delay: tuple[float, float], noise: float) -> np.ndarray:
    """Times of which a share is longer by a random part of the time, at least delay[0] and at most delay[1]."""
    times = MEDIAN * np.exp(random.normal(0, noise, count))
    slow = random.random(count) < share
    times[slow] *= 1 + random.uniform(*delay, slow.sum())
    return times.astype(np.int64)


def detection_rate(times: Callable[[np.random.Generator], np.ndarray], most: float = 0.25) -> float:
    """Fraction of series that have a slower group above a share."""
    groups = [slow_group.find(times(np.random.default_rng(seed))) for seed in range(TRIALS)]
    return sum(group is not None and group.share > most for group in groups) / TRIALS


@pytest.mark.parametrize("delay", [(0.5, 0.5), (0.15, 0.15), (0.1, 0.6), (0.3, 3.0)])
@pytest.mark.parametrize("share", [0.4, 0.5, 0.7])
def test_iterations_that_are_interrupted_more_often_than_allowed_are_a_slower_group(
    delay: tuple[float, float], share: float
) -> None:
    assert detection_rate(lambda random: interrupted(random, 1000, share, delay, 0.01)) > 0.99
    assert detection_rate(lambda random: interrupted(random, 30, share, delay, 0.01)) > 0.7, "a traced pass is short"


@pytest.mark.parametrize("count", [30, 1000])
def test_a_few_interruptions_are_within_the_limit(count: int) -> None:
    assert detection_rate(lambda random: interrupted(random, count, 0.1, (0.3, 3.0), 0.01)) < 0.1


def test_the_share_and_the_ratio_are_those_of_the_slower_group() -> None:
    times = interrupted(np.random.default_rng(0), 10_000, 0.4, (0.5, 0.5), 0.01)
    group = slow_group.find(times)
    assert group is not None
    share = (times[1250:] > 1.25 * MEDIAN).mean()
    assert (group.share, group.ratio) == (pytest.approx(share, abs=0.001), pytest.approx(1.5, abs=0.01))
    equal = slow_group.find(np.array([10_000, 20_000] * 50))
    assert equal is not None and (equal.share, equal.ratio) == (pytest.approx(0.5, abs=0.01), pytest.approx(2.0))


SHAPES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda random, count: MEDIAN * np.exp(random.normal(0, 0.1, count)),
    "uniform": lambda random, count: MEDIAN * (1 + random.uniform(0, 0.3, count)),
    "exponential": lambda random, count: MEDIAN * (1 + random.exponential(0.3, count)),
    "long tail": lambda random, count: MEDIAN * (1 + 0.05 * np.exp(random.normal(0, 1, count))),
    "outliers": lambda random, count: MEDIAN * np.exp(0.03 * random.standard_t(2, count)),
    "coarse clock": lambda random, count: np.round(500 * np.exp(random.normal(0, 0.05, count)) / 52.083) * 52.083,
    "clock of microseconds": lambda random, count: np.round(8400 * np.exp(random.normal(0, 0.02, count)) / 1000) * 1000,
    "clock of 280 ns": lambda random, count: np.round(2400 * np.exp(random.normal(0, 0.02, count)) / 279.4) * 279.4,
    "constant": lambda random, count: np.full(count, MEDIAN),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("count", "most"), [(30, 0.08), (100, 0.01), (1000, 0.0)])
def test_times_of_one_pace_are_one_group_however_wide(shape: str, count: int, most: float) -> None:
    assert detection_rate(lambda random: SHAPES[shape](random, count)) <= most


def test_a_pace_that_changes_once_at_the_beginning_is_drift() -> None:
    times = interrupted(np.random.default_rng(0), 800, 0.0, (0, 0), 0.01)
    times[100:] = times[100:] * 1.3
    assert slow_group.find(times) is None
    times[:400] = times[:400] / 1.3
    assert slow_group.find(times) is not None


def test_processes_may_have_paces_of_their_own() -> None:
    random = np.random.default_rng(0)
    counts = [200, 100, 300, 200]
    calm = np.concatenate(
        [interrupted(random, count, 0.0, (0, 0), 0.01) * factor for count, factor in zip(counts, (1, 1.3) * 2, strict=True)]
    )
    assert slow_group.find(calm) is not None and slow_group.find(calm, counts) is None
    shaken = np.concatenate(
        [interrupted(random, count, 0.4, (0.5, 1), 0.01) * factor for count, factor in zip(counts, (1, 2) * 2, strict=True)]
    )
    group = slow_group.find(shaken, counts)
    assert group is not None and group.share == pytest.approx(0.4, abs=0.05)


@given(arrays.arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 2**62)), st.lists(st.integers(-5, 40), max_size=5))
def test_any_samples_have_an_answer(samples: np.ndarray, processes: list[int]) -> None:
    group = slow_group.find(samples, processes)
    assert group is None or (0.0 < group.share < 0.9 and group.ratio >= 1.09)
