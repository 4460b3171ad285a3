"""Statistics of samples: what numpy says, and an interval that covers what it promises on series that have a memory."""

from __future__ import annotations

import math
import statistics as stdlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports.latency import statistics
from tests.support.refusals import refuses

SAMPLES = st.lists(st.integers(0, 2**53), min_size=1, max_size=300)
MEDIAN = 1_000_000


def _array(samples: list[int]) -> np.ndarray:
    return np.array(samples, dtype=np.int64)


def _series(count: int, memory: float, random: np.random.Generator) -> np.ndarray:
    """Return an AR(1) process around MEDIAN: each sample keeps `memory` of its predecessor's distance."""
    noise = random.standard_normal(count + 100)
    values = np.empty(count + 100)
    last = 0.0
    for index, step in enumerate(noise):
        last = values[index] = memory * last + step
    return (MEDIAN + 10_000 * values[100:]).astype(np.int64)


@given(SAMPLES)
def test_percentiles_and_moments_are_numpys(samples: list[int]) -> None:
    result = statistics.summarize(_array(samples))
    assert result is not None
    assert result.min == min(samples)
    for q, least, value in ((10, 10, result.p10), (50, 1, result.p50), (90, 10, result.p90), (99, 100, result.p99)):
        if len(samples) < least:
            assert value is None, f"{len(samples)} samples cannot tell p{q}"
        else:
            assert value == pytest.approx(np.percentile(_array(samples), q))
    assert result.p50 == pytest.approx(stdlib.median(samples))
    assert result.mean == pytest.approx(stdlib.fmean(samples))
    if len(samples) == 1:
        assert result.stddev is None
    else:
        assert result.stddev == pytest.approx(np.std(samples, ddof=1), rel=1e-9, abs=1e-3)


@given(SAMPLES)
def test_equal_samples_give_equal_numbers_and_stay_as_they_are(samples: list[int]) -> None:
    array = _array(samples)
    assert statistics.summarize(array) == statistics.summarize(array.copy())
    assert array.tolist() == samples


@given(SAMPLES)
def test_the_order_matters_only_where_time_does(samples: list[int]) -> None:
    result, shuffled = statistics.summarize(_array(samples)), statistics.summarize(_array(sorted(samples)))
    assert result is not None and shuffled is not None
    for name in ("min", "p10", "p50", "p90", "p99", "mean", "stddev"):
        assert getattr(result, name) == getattr(shuffled, name)


@given(SAMPLES)
def test_the_interval_holds_the_median_between_two_samples(samples: list[int]) -> None:
    result = statistics.summarize(_array(samples))
    assert result is not None
    assert result.p50_ci95 == statistics.median_interval(_array(samples))
    if len(samples) < 6:
        assert result.p50_ci95 is None
    elif result.p50_ci95 is None:
        assert result.effective_samples < 6
    else:
        low, high = result.p50_ci95
        assert result.min <= low <= result.p50 <= high
        assert {low, high} <= set(map(float, samples))


@given(st.lists(st.integers(0, 2**40), min_size=6, max_size=200), st.integers(2, 1000), st.integers(0, 2**40))
def test_the_interval_moves_and_scales_with_the_samples(samples: list[int], factor: int, offset: int) -> None:
    result = statistics.median_interval(_array(samples))
    moved = statistics.median_interval(_array(samples) * factor + offset)
    assert moved == (result and tuple(end * factor + offset for end in result))


def test_an_interval_that_would_reach_beyond_all_samples_is_absent() -> None:
    """Of two paces of which each came once nothing tells how often there is which; the outermost samples least of all."""
    paces = np.repeat([100_000, 140_000], 5000) + np.random.default_rng(1).integers(0, 1000, 10_000)
    paces[7] = 4_000_000
    assert statistics.effective_samples(paces) < 6
    assert statistics.median_interval(paces) is None


@given(SAMPLES)
def test_effective_samples_are_one_to_all(samples: list[int]) -> None:
    assert 1 <= statistics.effective_samples(_array(samples)) <= len(samples)


def _coverage(count: int, memory: float, trials: int = 300) -> tuple[float, float]:
    """How often the true median lies in our interval, and in one for independent samples (binomial, normal approximation)."""
    random = np.random.default_rng(1)
    ours = theirs = 0
    for _ in range(trials):
        series = _series(count, memory, random)
        low, high = statistics.median_interval(series) or (0, 0)
        ours += low <= MEDIAN <= high
        rank = int(count / 2 - 1.96 * math.sqrt(count) / 2)
        ordered = np.sort(series)
        theirs += int(ordered[rank] <= MEDIAN <= ordered[-rank - 1])
    return ours / trials, theirs / trials


@pytest.mark.parametrize("count", [100, 200, 500])
def test_the_interval_covers_the_median_where_neighbours_resemble_each_other(count: int) -> None:
    ours, theirs = _coverage(count, memory=0.6)
    assert 0.88 <= ours <= 0.99
    assert theirs < 0.80, "the simulation must be one that an interval for independent samples fails"


@pytest.mark.parametrize("count", [20, 100, 500])
def test_the_interval_covers_the_median_of_independent_samples(count: int) -> None:
    ours, _ = _coverage(count, memory=0.0)
    assert 0.92 <= ours <= 1.0


def test_independent_samples_do_not_pay_for_the_blocks() -> None:
    widths = []
    random = np.random.default_rng(2)
    for _ in range(20):
        low, high = statistics.median_interval(_series(1000, 0.0, random)) or (0, 0)
        widths.append(high - low)
    ideal = 2 * 1.96 * math.sqrt(math.pi / 2 / 1000) * 10_000
    assert np.median(widths) == pytest.approx(ideal, rel=0.15)


@pytest.mark.parametrize("memory", [0.0, 0.3, 0.6, 0.9])
def test_effective_samples_follow_the_autocorrelation(memory: float) -> None:
    random = np.random.default_rng(3)
    result = np.median([statistics.effective_samples(_series(5000, memory, random)) for _ in range(20)]) / 5000
    # Being above the median has the autocorrelation 2/pi asin(memory^k).
    ideal = 1 / (1 + 2 * sum(2 / math.pi * math.asin(memory**lag) for lag in range(1, 200)))
    assert result == pytest.approx(ideal, rel=0.2)


def test_blocks_are_longer_the_longer_the_memory_is() -> None:
    lengths = []
    for memory in (0.0, 0.3, 0.6, 0.9):
        random = np.random.default_rng(4)
        result = []
        for _ in range(11):
            series = _series(2000, memory, random) > MEDIAN
            result.append(statistics.block_length(series - series.mean()))
        lengths.append(float(np.median(result)))
    assert lengths[0] <= 2
    assert lengths == sorted(set(lengths))


@given(st.lists(st.integers(1000, 1010), min_size=30, max_size=300), st.floats(0.5, 2))
def test_drift_is_the_ratio_of_the_ends(samples: list[int], factor: float) -> None:
    third = len(samples) // 3
    array = _array(samples)
    array[-third:] = np.round(array[-third:] * 1000 * factor).astype(np.int64)
    array[:-third] *= 1000
    result = statistics.drift(array)
    assert result == pytest.approx(factor - 1, abs=0.03)


@given(st.lists(st.integers(1000, 1010), min_size=30, max_size=300), st.data())
def test_a_few_outliers_are_no_drift(samples: list[int], data: st.DataObject) -> None:
    for index in data.draw(st.lists(st.integers(0, len(samples) - 1), max_size=len(samples) // 8)):
        samples[index] = 2**40
    assert statistics.drift(_array(samples)) == pytest.approx(0, abs=0.011)


def test_drift_needs_samples_and_time() -> None:
    assert statistics.drift(_array([5] * 29)) is None
    assert statistics.drift(_array([5] * 30)) == 0
    assert statistics.drift(_array([0] * 30)) is None


def test_samples_that_are_all_equal_are_certain() -> None:
    result = statistics.summarize(_array([7] * 100))
    assert result is not None
    assert (result.p50_ci95, result.effective_samples, result.drift, result.stddev) == ((7, 7), 100, 0, 0)


def test_a_million_samples_agree_with_the_normal_approximation() -> None:
    samples = np.random.default_rng(5).permutation(np.arange(1, 1_000_001))
    interval = statistics.median_interval(samples)
    assert interval is not None
    assert interval[0] == pytest.approx(500_000 - 1.959964 * 500, rel=3e-4)
    assert interval[1] == pytest.approx(500_000 + 1.959964 * 500, rel=3e-4)


def test_no_samples_have_no_summary() -> None:
    assert statistics.summarize(_array([])) is None
    assert statistics.median_interval(_array([])) is None


def test_a_file_of_samples_is_read_as_little_endian_nanoseconds(tmp_path: Path) -> None:
    file = tmp_path / "samples"
    file.write_bytes(b"\x01\x02" + bytes(6) + b"\xff" * 7 + b"\x7f")
    assert statistics.read_samples(file).tolist() == [513, 2**63 - 1]


@pytest.mark.remedy("BAD_SAMPLES")
@pytest.mark.parametrize("data", [bytes(9), b"\xff" * 8])
def test_a_cut_or_negative_sample_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "samples").write_bytes(data)
    with refuses("BAD_SAMPLES"):
        statistics.read_samples(tmp_path / "samples")
    (tmp_path / "samples").write_bytes(bytes([7, *bytes(7)]))
    assert statistics.read_samples(tmp_path / "samples").tolist() == [7], "what a runner of the server's version writes"


def test_a_median_of_few_independent_samples_does_not_reach_the_slowest_of_all() -> None:
    """The clock has eight paces of a thousand samples each; some samples are interrupted for a whole time slice."""
    random = np.random.default_rng(5)
    samples = np.repeat(random.permutation(np.linspace(900, 1100, 8)), 1000) + random.normal(0, 2, 8000)
    samples[random.integers(8000, size=40)] = 4e6
    assert statistics.effective_samples(_array(samples)) < 20
    ends = statistics.median_interval(_array(samples))
    assert ends is None or ends[1] < 1200
