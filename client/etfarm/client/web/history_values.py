"""A model's history as a page shows it: rows and the columns of a chart for each series. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.formats import answers, units
from etfarm.client.jobs.history import Point, Series, describe_change, describe_doubts
from etfarm.wire.changes import sentence
from etfarm.wire.sqnr import level

COMMIT_LABELS: Final = ("commit", "git_commit", "git-commit", "sha", "revision")
"""Labels of a job that name the commit which it measured, in this order."""
COMMIT_CHARACTERS: Final = 10
MOODS: Final = {"slower": "bad", "faster": "good"}


@dataclass(frozen=True)
class Row:
    """A report of a series."""

    point: Point
    name: str
    """The job's name, or the beginning of its id."""
    commit: str
    median: str
    change: str
    mood: str
    is_change: bool
    """Whether the median differs from the previous one by more than separate runs explain."""
    doubts: str
    differences: tuple[str, ...]
    """What was another than at the previous point."""
    size: str
    sqnr: str


@dataclass(frozen=True)
class Trend:
    """A series."""

    series: Series
    rows: tuple[Row, ...]
    """The newest first."""
    chart: dict[str, Any]
    """Columns of the chart, oldest first: times in seconds, medians and the ends of their intervals in nanoseconds."""


def describe_trends(series: Sequence[Series], labels: Mapping[str, Mapping[str, str]], names: Mapping[str, str]) -> list[Trend]:
    """Return what the page shows of each series.

    Args:
        labels, names: labels and names of jobs by id, as far as they are known.
    """
    return [_trend(each, labels, names) for each in series]


def commit_of(labels: Mapping[str, str]) -> str:
    """Return the beginning of the commit that a job's labels name; empty without one."""
    return next((labels[key] for key in COMMIT_LABELS if labels.get(key)), "")[:COMMIT_CHARACTERS]


def _trend(series: Series, labels: Mapping[str, Mapping[str, str]], names: Mapping[str, str]) -> Trend:
    rows = [_row(point, labels.get(point.entry.job, {}), names.get(point.entry.job, "")) for point in series.points]
    return Trend(series, tuple(reversed(rows)), _chart(rows))


def _row(point: Point, labels: Mapping[str, str], name: str) -> Row:
    change, outcome = describe_change(point)
    latency = answers.latency(point.entry.report.to_dict())
    return Row(
        point,
        name or point.entry.job[:12],
        commit_of(labels),
        " ".join(filter(None, (latency.text, latency.detail))) or "-",
        change,
        MOODS.get(outcome, ""),
        outcome in MOODS,
        describe_doubts(point),
        tuple(sentence(item) for item in point.changes),
        units.size(point.size_bytes),
        "" if point.sqnr_db is None else level(point.sqnr_db),
    )


def _chart(rows: Sequence[Row]) -> dict[str, Any]:
    timed = [row for row in rows if row.point.time_ns is not None]
    ends = [_ends(row.point) for row in timed]
    return {
        "times_s": [row.point.entry.at.timestamp() for row in timed],
        "medians_ns": [row.point.time_ns for row in timed],
        "low_ns": [low for low, _ in ends],
        "high_ns": [high for _, high in ends],
        "valid": [row.point.is_comparable for row in timed],
        "changes": [row.mood if row.is_change else "" for row in timed],
        "names": [row.commit or row.name for row in timed],
        "jobs": [row.point.entry.job for row in timed],
    }


def _ends(point: Point) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the median, which covers the variation between runs if that is known."""
    report = point.entry.report
    between = report.run_spread.p50_ci95_ns if report.run_spread is not None else None
    within = report.latency.p50_ci95_ns if report.latency is not None else None
    return tuple(between or within or (None, None))  # type: ignore[return-value]
