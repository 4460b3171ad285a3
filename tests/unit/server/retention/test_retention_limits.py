"""The limits of what is kept: what `--keep` accepts, and the sentence for everything else."""

from __future__ import annotations

import pytest

from etfarm.server.retention.limits import DAY_S, Limit, Limits
from tests.support.refusals import refuses


def test_settings_change_single_limits_and_are_shown_as_they_are_written() -> None:
    limits = Limits.of(["jobs=90d,20GiB", "cache=forever", "artifacts=200GiB", "audit=26w", "logs=12h"])
    assert limits.jobs == Limit(90 * DAY_S, 20 << 30) and limits.cache == Limit()
    assert [str(limit) for limit in vars(limits).values()] == ["90d,20GiB", "12h", "forever", "200GiB", "26w"]
    assert Limits.of(["jobs=forever"], limits).artifacts == limits.artifacts


@pytest.mark.parametrize("text", ["90d", "1w", "36h", "512MiB", "3TiB", "1w,1GiB", "forever"])
def test_a_limit_is_written_as_it_is_read(text: str) -> None:
    assert str(Limits.of([f"jobs={text}"]).jobs) == text
    assert Limits.of([f"jobs={Limits.of([f'jobs={text}']).jobs}"]) == Limits.of([f"jobs={text}"])


@pytest.mark.remedy("BAD_RETENTION")
@pytest.mark.parametrize(
    "setting",
    [
        "", "jobs", "jobs=", "jobs=90", "jobs=90 d", "jobs=-1d", "jobs=1d,2d", "jobs=0h", "jobs=999999w", "jobs=1d,", "job=1d",
        "jobs=9999999d", "jobs=1e3d", "jobs=٣d", "audit=29d", "audit=1GiB", "artifacts=1GB", "x" * 5000,
    ],
)  # fmt: skip
def test_another_setting_is_refused_with_what_to_write(setting: str) -> None:
    with refuses("BAD_RETENTION") as refused:
        Limits.of([setting])
    assert refused.value.remedy and len(str(refused.value)) < 500
    Limits.of(["jobs=90d", "artifacts=200GiB", "cache=90d,200GiB", "audit=30d", "logs=forever"])
