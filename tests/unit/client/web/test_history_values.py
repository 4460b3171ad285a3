"""A model's history as the page shows it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from etfarm.client.jobs.history import HistoryEntry, trends
from etfarm.client.models import Report
from etfarm.client.web.history_values import commit_of, describe_trends
from tests.support import comparisons

START = datetime(2026, 1, 2, tzinfo=UTC)


def entries(*reports: dict[str, Any]) -> list[HistoryEntry]:
    """Return entries, newest first, of reports that are given oldest first."""
    listed = [
        HistoryEntry(f"job{place}", (), START + timedelta(days=place), Report.from_dict(each))
        for place, each in enumerate(reports)
    ]
    return listed[::-1]


def test_a_change_beyond_the_intervals_is_marked() -> None:
    medians = (1000.0, 1001.0, 1300.0, 900.0)
    reports = [
        comparisons.observed(cell, value, (value * 0.99, value * 1.01)) for cell, value in zip("abcd", medians, strict=True)
    ]
    (trend,) = describe_trends(trends(entries(*reports)), {"job2": {"commit": "c0ffee" * 5}}, {"job2": "nightly"})
    assert [row.mood for row in trend.rows] == ["good", "bad", "", ""]
    assert [(row.name, row.commit) for row in trend.rows][1] == ("nightly", "c0ffeec0ff")
    assert trend.chart["medians_ns"] == list(medians)
    assert trend.chart["changes"] == ["", "", "bad", "good"]
    assert trend.chart["names"] == ["job0", "job1", "c0ffeec0ff", "job3"]
    assert trend.chart["low_ns"][0] == pytest.approx(990.0)


def test_a_report_without_numbers_is_a_row_and_no_point() -> None:
    failed = comparisons.report("c", latency=None, state="FAILED", verdict=None, error={"reason": "PROGRAM_CRASHED"})
    (trend,) = describe_trends(trends(entries(comparisons.timed("c", 1000.0), failed)), {}, {})
    assert trend.rows[0].median == "-"
    assert trend.rows[0].doubts == "program crashed"
    assert trend.chart["medians_ns"] == [1000.0]


def test_the_first_known_label_names_the_commit() -> None:
    assert commit_of({"sha": "b", "commit": "a"}) == "a"
    assert commit_of({"revision": "r" * 40}) == "r" * 10
    assert commit_of({"team": "vision"}) == ""
