"""Several cells side by side: medians and intervals on one scale, names by what distinguishes them, and the runs of one cell.

These are pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etfarm.client.formats import answers, label, sentences, units

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """A median with its interval, as percentages of a scale."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The length of the interval."""
        return round(self.high - self.low, 3)


@dataclass(frozen=True)
class Run:
    """One process that measured the program."""

    number: int
    bar: Bar
    text: str
    """`1.84 ms [1.82, 1.86]`."""
    status: str
    """`VALID`; empty if unknown."""


def bars(reports: Sequence[Json]) -> list[Bar | None]:
    """Return each report's median on a scale from 0 to the highest end of an interval; None without a latency."""
    ranges = [_range(report) for report in reports]
    top = max((high for known in ranges if known for high in known), default=0.0)
    return [_bar(known, 0.0, top) if known and top > 0 else None for known in ranges]


def _range(report: Json) -> tuple[float, float, float] | None:
    """Return median, low and high; the interval covers the variation between runs if that is known."""
    latency = report["latency"]
    if not latency or latency["p50_ns"] is None:
        return None
    between = (report["run_spread"] or {}).get("p50_ci95_ns")
    return _with_ends(latency["p50_ns"], between or latency["p50_ci95_ns"])


def _with_ends(middle: float, ends: Sequence[float] | None) -> tuple[float, float, float]:
    low, high = ends if ends and len(ends) == 2 else (middle, middle)
    return middle, low, high


def _bar(known: tuple[float, float, float], low: float, high: float) -> Bar:
    return Bar(*(round(100 * min(1.0, max(0.0, (value - low) / ((high - low) or 1.0))), 3) for value in known))


def runs(report: Json) -> list[Run]:
    """Return the runs of a report on one scale, which begins near the lowest end; empty unless there are several."""
    timed = [(number, run) for number, run in enumerate(report["runs"] or (), 1) if run["p50_ns"] is not None]
    if len(timed) < 2:
        return []
    ranges = [_with_ends(run["p50_ns"], run["p50_ci95_ns"]) for _, run in timed]
    low, high = min(each[1] for each in ranges), max(each[2] for each in ranges)
    margin = (high - low) * 0.05
    return [
        Run(
            number,
            _bar(known, low - margin, high + margin),
            " ".join(answers.median(run)).strip(),
            (run["verdict"] or {}).get("status") or "",
        )
        for (number, run), known in zip(timed, ranges, strict=True)
    ]


_SPREAD_SOURCES = {
    "REPEATS": "in this report",
    "HISTORY": "in the history of this program on this device",
    "PRIOR": "of other programs on similar devices, an assumption",
}


def spread(report: Json) -> str:
    """Return how much medians of separate runs vary; empty if unknown."""
    known = report["run_spread"]
    if not known or known["relative_stddev"] is None:
        return ""
    source = _SPREAD_SOURCES.get(str(known["source"]), "")
    what = "report" if known["source"] == "HISTORY" and len(report["runs"]) > 1 else "run"
    counted = f", from {units.count(known['runs'], what)} {source}".rstrip() if known["runs"] else ""
    if not known["runs"] and known["source"] == "PRIOR":
        counted = ", an assumption: too few runs of similar programs are known"
    p50_ns = (report["latency"] or {}).get("p50_ns")
    ends = known["p50_ci95_ns"]
    covering = f". The 95 % interval that covers it: {' '.join(units.estimate(p50_ns, *ends))}" if ends and p50_ns else ""
    return f"±{sentences.change(known['relative_stddev']).lstrip('+')} between {what}s (standard deviation){counted}{covering}"


def short_labels(reports: Sequence[Json]) -> list[str]:
    """Return the labels of reports without the parts that all of them share."""
    parts = [label(report).split(" · ") for report in reports]
    shared = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    labels = [" · ".join(part for part in own if part not in shared) for own in parts]
    return [short or f"report {number}" for number, short in enumerate(labels)]
