"""A comparison as a page shows it: the answer, the ratio with its interval, facts, and operators side by side. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.formats import answers, compared, units
from etfarm.client.formats.compared import Fact
from etfarm.wire import views

Json = Mapping[str, Any]

MAX_OPERATORS: Final = 200
MOODS: Final = {"faster": "good", "slower": "bad"}


@dataclass(frozen=True)
class Operator:
    """Corresponding operators of both sides."""

    name: str
    module: str
    place: str
    """`models/net.py:31`; empty if unknown."""
    code: str
    base: str
    """Time and share; `-` where the side lacks it."""
    candidate: str
    base_part: float
    candidate_part: float
    """Times as percentages of the longest."""
    change: str
    mood: str


@dataclass(frozen=True)
class Pair:
    """A report and its counterpart."""

    heading: str
    answer: str
    mood: str
    status: str
    """VALID if both latencies are; empty without a latency."""
    ratio: float | None
    ends: tuple[float, float] | None
    """The 95 % interval of the ratio."""
    method: str
    """How both were compared: `in turns, 40 rounds`, or `in separate runs`."""
    facts: tuple[Fact, ...]
    operators: tuple[Operator, ...]
    note: str
    """How operators were matched, and how many did not change."""
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Scale:
    """The axis of ratios that all pairs share, in percent of its width; 1 is in the middle of a logarithmic axis."""

    reach: float

    def part(self, ratio: float) -> float:
        """Return the position of a ratio from 0 to 100."""
        return round(50 + 50 * max(-1.0, min(1.0, math.log(ratio) / self.reach)), 2)


def describe_pairs(document: Json) -> list[Pair]:
    """Return the pairs of etfarm.comparison/1."""
    return [_pair(pair) for pair in document["pairs"]]


def fit_scale(pairs: Sequence[Pair]) -> Scale:
    """Return the axis on which all intervals fit."""
    known = [value for pair in pairs for value in (pair.ratio, *(pair.ends or ())) if value and value > 0]
    return Scale(max((abs(math.log(value)) for value in known), default=0.0) * 1.1 or math.log(1.05))


def _pair(pair: Json) -> Pair:
    latency = pair["latency"] or {}
    status = compared.status(pair) or ""
    mood = MOODS.get(compared.main_change(pair)[1], "") if status == "VALID" else ""
    notes = filter(None, (compared.matching(pair), compared.unmoved(pair)))
    ends = latency.get("ratio_ci95")
    return Pair(
        compared.heading(pair),
        compared.answer(pair),
        mood,
        status,
        latency.get("ratio"),
        (ends[0], ends[1]) if ends else None,
        _describe_method(latency),
        tuple(compared.facts(pair)),
        _operators(pair),
        "; ".join(notes),
        (*compared.changed(pair), *compared.joined(pair)),
    )


def _describe_method(latency: Json) -> str:
    if not latency or latency["ratio"] is None:
        return ""
    return f"in turns, {units.count(latency['rounds'], 'round')}" if latency["method"] == "paired" else "in separate runs"


def _operators(pair: Json) -> tuple[Operator, ...]:
    """Return the rows of both sides, the largest changes first."""
    rows = (pair["operators"] or {}).get("rows", ())[:MAX_OPERATORS]
    longest = max((row[side]["time_ns"] or 0.0 for row in rows for side in ("base", "candidate") if row[side]), default=0.0)
    return tuple(_operator(row, longest or 1.0) for row in rows)


def _operator(row: Json, longest_ns: float) -> Operator:
    types = [answers.short_type(name) for name in row["op_types"]]
    names = [row[side]["name"] for side in ("candidate", "base") if row[side] and row[side]["name"]]
    name = " + ".join(types) or next(iter(names), "several operators")
    change = "" if row["change_ns"] is None else units.difference(row["change_ns"], row["change_ci95_ns"])
    return Operator(
        compared.name_of(row, name),
        row["module"] or "",
        views.line_of(row) or "",
        ((row["source"] or {}).get("code") or "").strip(),
        _time(row["base"]),
        _time(row["candidate"]),
        _part(row["base"], longest_ns),
        _part(row["candidate"], longest_ns),
        change,
        MOODS.get(row["outcome"] or "", ""),
    )


def _time(side: Json | None) -> str:
    if side is None:
        return "-"
    return " · ".join(filter(None, (units.time(side["time_ns"]), units.percent(side["share"]))))


def _part(side: Json | None, longest_ns: float) -> float:
    return round(100 * ((side or {}).get("time_ns") or 0.0) / longest_ns, 2)
