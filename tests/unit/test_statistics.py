"""Statistics of samples: what numpy says, and an interval that covers what it promises."""

from __future__ import annotations

import math
import statistics as stdlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.reports import statistics

SAMPLES = st.lists(st.integers(0, 2**53), min_size=1, max_size=300)


def _array(samples: list[int]) -> np.ndarray:
    return np.array(samples, dtype=np.int64)


@given(SAMPLES)
def test_percentiles_and_moments_are_numpys(samples: list[int]) -> None:
    found = statistics.summarize(_array(samples))
    assert found is not None
    assert found.min == min(samples)
    for q, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == pytest.approx(np.percentile(_array(samples), q))
    assert found.p50 == pytest.approx(stdlib.median(samples))
    assert found.mean == pytest.approx(stdlib.fmean(samples))
    if len(samples) == 1:
        assert found.stddev is None
    else:
        assert found.stddev == pytest.approx(np.std(samples, ddof=1), rel=1e-9, abs=1e-3)


@given(SAMPLES)
def test_the_order_of_samples_does_not_matter_and_they_stay_as_they_are(samples: list[int]) -> None:
    array = _array(samples)
    assert statistics.summarize(array) == statistics.summarize(_array(sorted(samples)))
    assert array.tolist() == samples


@given(SAMPLES)
def test_the_interval_holds_the_median_between_two_samples(samples: list[int]) -> None:
    found = statistics.summarize(_array(samples))
    assert found is not None
    if len(samples) < 6:
        assert found.p50_ci95 is None
    else:
        assert found.p50_ci95 is not None
        low, high = found.p50_ci95
        assert found.min <= low <= found.p50 <= high
        assert {low, high} <= set(map(float, samples))


@pytest.mark.parametrize("count", [6, 7, 8, 9, 20, 99, 100, 101, 543, 1000])
def test_the_interval_is_the_narrowest_that_covers_95_percent(count: int) -> None:
    interval = statistics.median_interval(np.arange(1, count + 1))
    assert interval is not None
    rank = int(interval[0])
    assert interval[1] == count + 1 - rank

    def missed(rank: int) -> float:
        return 2 * sum(math.comb(count, k) for k in range(rank)) / 2**count

    assert missed(rank) <= 0.05 < missed(rank + 1)


def test_a_million_samples_agree_with_the_normal_approximation() -> None:
    interval = statistics.median_interval(np.arange(1, 1_000_001))
    assert interval is not None
    assert interval[0] == pytest.approx(500_000 - 1.959964 * 500, abs=2)


def test_no_samples_have_no_summary() -> None:
    assert statistics.summarize(_array([])) is None


def test_a_file_of_samples_is_read_as_little_endian_nanoseconds(tmp_path: Path) -> None:
    file = tmp_path / "samples"
    file.write_bytes(b"\x01\x02" + bytes(6) + b"\xff" * 7 + b"\x7f")
    assert statistics.read_samples(file).tolist() == [513, 2**63 - 1]


@pytest.mark.parametrize("data", [bytes(9), b"\xff" * 8])
def test_a_cut_or_negative_sample_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "samples").write_bytes(data)
    with pytest.raises(statistics.BadSamples):
        statistics.read_samples(tmp_path / "samples")
