"""Programs that took turns: what the ratio is made of, and how often equal programs are called different."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from etfarm.server.reports.latency import interleaved
from etfarm.server.reports.latency.interleaved import Rounds, compare, interval, medians, rounds_of
from etfarm.server.reports.latency.samples import Block
from tests.support.refusals import refuses

STARTS, OF_START = 8, 5


def samples(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def test_a_round_has_one_ratio_of_medians_and_pairs_of_both_programs() -> None:
    blocks = [Block(0, 0, 3), Block(1, 0, 2), Block(2, 1, 1)]
    base = medians(samples(10, 10, 99, 20, 20, 50), blocks)
    other = medians(samples(9, 9, 1, 30, 30, 60), blocks)
    rounds = rounds_of(other, base)
    assert rounds.ratios.tolist() == [0.9, 1.5, 1.2]
    assert rounds.pairs.tolist() == [0, 0, 1]
    result = compare(rounds)
    assert result is not None and (result.ratio, result.ci95) == (1.2, None), "too few rounds for an interval"


def test_rounds_that_one_of_them_lacks_do_not_count() -> None:
    base = medians(samples(10, 20), [Block(0, 0, 1), Block(1, 0, 1)])
    assert rounds_of(medians(samples(5), [Block(1, 0, 1)]), base).ratios.tolist() == [0.25]
    assert rounds_of(medians(samples(5), [Block(1, 3, 1)]), base).ratios.size == 0, "of another start"
    assert compare(rounds_of({}, base)) is None
    assert rounds_of({0: (0, 1.0)}, {0: (0, 0.0)}).ratios.size == 0


@pytest.mark.remedy("BAD_BLOCKS")
@pytest.mark.parametrize(
    "blocks",
    [
        [Block(0, 0, 2)],
        [Block(0, 0, 4)],
        [Block(0, 0, 3), Block(1, 0, 0)],
        [Block(0, 0, 1), Block(0, 0, 2)],
        [Block(0, 0, -1), Block(1, 0, 4)],
        [],
    ],
)
def test_blocks_that_do_not_make_up_the_samples_are_refused(blocks: list[Block]) -> None:
    with refuses("BAD_BLOCKS"):
        medians(samples(1, 2, 3), blocks)
    assert medians(samples(1, 2, 3), [Block(0, 0, 2), Block(1, 0, 1)]), "what an agent of the server's version sends"


@pytest.mark.slow(reason="simulates thousands of comparisons")
@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(0.5, 2), min_size=1, max_size=5), min_size=4, max_size=10), st.floats(0.1, 10))
def test_the_interval_holds_the_ratio_and_scales_with_the_rounds(starts: list[list[float]], factor: float) -> None:
    ratios = np.array([ratio for start in starts for ratio in start])
    pairs = np.repeat(np.arange(len(starts)), [len(start) for start in starts])
    result = interval(Rounds(ratios, pairs))
    if ratios.size < interleaved.MIN_ROUNDS:
        assert result is None
        return
    assert result is not None
    assert 0 < result[0] <= np.median(ratios) * (1 + 1e-9) and np.median(ratios) <= result[1] * (1 + 1e-9)
    assert result == interval(Rounds(ratios, pairs + 5)), "equal rounds give equal numbers"
    assert interval(Rounds(ratios * factor, pairs)) == pytest.approx([end * factor for end in result])


def test_equal_ratios_have_an_interval_without_width() -> None:
    assert interval(Rounds(np.full(24, 0.9), np.repeat(np.arange(8), 3))) == pytest.approx((0.9, 0.9))


@pytest.mark.slow(reason="simulates thousands of comparisons")
def test_equal_programs_are_rarely_called_different_where_pooled_samples_often_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that drifts, processes that are faster or slower for all of their lives, samples that resemble each other."""
    monkeypatch.setattr(interleaved, "RESAMPLES", 2000)
    random = np.random.default_rng(7)
    trials, pooled_trials, called, pooled = 200, 40, 0, 0
    for trial in range(trials):
        ratios, pairs, all_of = [], [], ([], [])  # type: ignore[var-annotated]
        level = 0.0
        for start in range(STARTS):
            offsets = random.normal(0, 0.005, 2)
            for _ in range(OF_START):
                blocks = []
                for which in random.permutation(2):
                    level = 0.9 * level + random.normal(0, 0.004)
                    block = np.exp(level + offsets[which] + random.normal(0, 0.003, 40))
                    all_of[which].append(block)
                    blocks.append((which, float(np.median(block))))
                both = dict(blocks)
                ratios.append(both[1] / both[0])
                pairs.append(start)
        result = interval(Rounds(np.array(ratios), np.array(pairs)))
        assert result is not None
        called += not result[0] <= 1 <= result[1]
        if trial < pooled_trials:
            pooled += not _holds_one(np.concatenate(all_of[0]), np.concatenate(all_of[1]), random)
    assert called / trials <= 0.08
    assert pooled / pooled_trials > 0.25


def _holds_one(one: NDArray[np.float64], other: NDArray[np.float64], random: np.random.Generator) -> bool:
    """Whether resampling all samples as if they were independent leaves the ratio 1 possible."""

    def drawn(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.median(values[random.integers(0, values.size, (200, values.size))], axis=1)

    low, high = np.quantile(drawn(other) / drawn(one), (0.025, 0.975))
    return bool(low <= 1 <= high)


def test_three_percent_are_found_between_programs_whose_processes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "RESAMPLES", 2000)
    random = np.random.default_rng(3)
    result = 0
    for _ in range(100):
        noise = [random.normal(0, 0.005) - random.normal(0, 0.005) for _ in range(STARTS)]
        ratios = [1.03 * math.exp(each + random.normal(0, 0.005)) for each in noise for _ in range(OF_START)]
        ends = interval(Rounds(np.array(ratios), np.repeat(np.arange(STARTS), OF_START)))
        assert ends is not None
        result += ends[0] > 1
    assert result >= 95


def test_a_start_with_more_rounds_than_others_counts_as_one_start() -> None:
    even = Rounds(np.array([1.0, 1.02, 0.99, 1.01] * 8), np.repeat(np.arange(8), 4))
    longer = Rounds(np.append(even.ratios, [1.0, 1.02, 0.99, 1.01] * 4), np.append(even.pairs, [7] * 16))
    ends, longer_ends = interval(even), interval(longer)
    assert ends is not None and longer_ends is not None
    assert longer_ends[1] - longer_ends[0] > 0.6 * (ends[1] - ends[0])


def test_rounds_that_something_disturbed_leave_the_interval_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "RESAMPLES", 2000)
    random = np.random.default_rng(11)
    widths, misses = [], 0
    for _ in range(100):
        noise = random.normal(0, 0.003, (STARTS, OF_START, 2)) + 0.15 * (random.random((STARTS, OF_START, 2)) < 0.25)
        ends = interval(Rounds(np.exp(noise[..., 1] - noise[..., 0]).ravel(), np.repeat(np.arange(STARTS), OF_START)))
        assert ends is not None
        widths.append(ends[1] - ends[0])
        misses += not ends[0] <= 1 <= ends[1]
    assert misses <= 5
    assert np.median(widths) < 0.05, "a quarter of the blocks was 15 % slower"
