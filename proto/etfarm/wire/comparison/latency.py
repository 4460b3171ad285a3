"""How much faster or slower: the ratio of two medians, and how well it is known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from etfarm.wire.comparison.numbers import finite, number, ratio
from etfarm.wire.report import Json

Interval = tuple[float, float]


@dataclass(frozen=True)
class Ratio:
    """Candidate over base, with its 95 % interval where it can be told."""

    ratio: float
    ci95: Interval | None
    method: str
    """paired or separate."""
    rounds: int | None = None
    process_pairs: int | None = None


def latency(base: Json, candidate: Json) -> Json | None:
    """The latency part of a PAIR; None where neither side measured any."""
    if not (base["latency"] or candidate["latency"]):
        return None
    found = compared(base, candidate)
    times = {key: number(_of(base, "latency", key), _of(candidate, "latency", key)) for key in ("p50_ns", "p90_ns", "p99_ns")}
    loads = ("load_ns", "load_method_ns", "first_run_ns")
    return {
        "ratio": found.ratio if found else None,
        "ratio_ci95": list(found.ci95) if found and found.ci95 else None,
        "method": found.method if found else None,
        "outcome": outcome(found) if found else None,
        "rounds": found.rounds if found else None,
        "process_pairs": found.process_pairs if found else None,
        **times,
        **{key: number(_of(base, "load", key), _of(candidate, "load", key)) for key in loads},
    }


def outcome(found: Ratio) -> str:
    """What a ratio says."""
    if found.ci95 is None:
        return "too_few"
    if found.ci95[0] <= 1 <= found.ci95[1]:
        return "no_difference"
    return "faster" if found.ratio < 1 else "slower"


def compared(base: Json, candidate: Json) -> Ratio | None:
    """The ratio of the medians, by rounds where the two took turns in one attempt; None where a side has no median."""
    return paired(base, candidate) or separate(base, candidate)


def separate(base: Json, candidate: Json) -> Ratio | None:
    """The ratio of two medians that were measured apart.

    Its interval takes the medians' own (a block bootstrap's) as independent, and adds their halves' squares on a logarithmic
    scale, each side by itself: they are not symmetric. It cannot know how runs at different times differ beyond that.
    """
    base_ns, candidate_ns = _of(base, "latency", "p50_ns"), _of(candidate, "latency", "p50_ns")
    found = ratio(base_ns, candidate_ns)
    if found is None or base_ns is None or candidate_ns is None:
        return None
    ends = _ends(base), _ends(candidate)
    if ends[0] is None or ends[1] is None:
        return Ratio(found, None, "separate")
    return _with_interval(found, _relative(base_ns, ends[0]), _relative(candidate_ns, ends[1]), "separate")


def paired(base: Json, candidate: Json) -> Ratio | None:
    """The ratio by rounds of one interleaved attempt; None where the two are not of one.

    The report of a later candidate has it against the first one. Of two later ones the ratio is that of their ratios, and its
    interval takes both as independent, which they are not: they share the first candidate's noise, so it is rather too wide.
    """
    if base["attempt"] is None or base["attempt"] != candidate["attempt"] or base["cell"] == candidate["cell"]:
        return None
    of_base, of_candidate = base["interleaved"], candidate["interleaved"]
    if of_candidate and of_candidate["base_cell"] == base["cell"]:
        return _told(of_candidate["ratio"], of_candidate["ratio_ci95"], of_candidate)
    if of_base and of_base["base_cell"] == candidate["cell"]:
        ends = of_base["ratio_ci95"]
        turned = [1 / ends[1], 1 / ends[0]] if _usable(ends) else None
        return _told(ratio(of_base["ratio"], 1.0), turned, of_base)
    if of_base and of_candidate and of_base["base_cell"] == of_candidate["base_cell"]:
        return _through_first(of_base, of_candidate)
    return None


def _through_first(of_base: Json, of_candidate: Json) -> Ratio | None:
    found = ratio(of_base["ratio"], of_candidate["ratio"])
    if found is None:
        return None
    rounds, pairs = (min(of_base[key], of_candidate[key]) for key in ("rounds", "process_pairs"))
    if not (_usable(of_base["ratio_ci95"]) and _usable(of_candidate["ratio_ci95"])):
        return Ratio(found, None, "paired", rounds, pairs)
    ends = [_relative(one["ratio"], tuple(one["ratio_ci95"])) for one in (of_base, of_candidate)]
    return _with_interval(found, ends[0], ends[1], "paired", rounds, pairs)


def _told(found: float | None, ends: list[float] | None, interleaved: Json) -> Ratio | None:
    """A ratio as an interleaved report has it."""
    if found is None or ratio(1.0, found) is None:
        return None
    ci95 = (ends[0], ends[1]) if ends and _usable(ends) and all(map(math.isfinite, ends)) else None
    return Ratio(found, ci95, "paired", interleaved["rounds"], interleaved["process_pairs"])


def _with_interval(
    found: float, base: Interval, candidate: Interval, method: str, rounds: int | None = None, pairs: int | None = None
) -> Ratio:
    """`found` with the interval of two independent ones, each as how far it goes down and up on a logarithmic scale."""
    low = finite(found * math.exp(-math.hypot(candidate[0], base[1])))
    try:
        high = finite(found * math.exp(math.hypot(candidate[1], base[0])))
    except OverflowError:
        high = None
    return Ratio(found, None if low is None or high is None else (low, high), method, rounds, pairs)


def _relative(middle: float, ends: Interval) -> Interval:
    """How far an interval goes below and above `middle`, as logarithms."""
    return max(0.0, math.log(middle) - math.log(ends[0])), max(0.0, math.log(ends[1]) - math.log(middle))


def _ends(report: Json) -> Interval | None:
    ends = _of(report, "latency", "p50_ci95_ns")
    return (ends[0], ends[1]) if _usable(ends) else None


def _usable(ends: list[float] | None) -> bool:
    return ends is not None and len(ends) == 2 and all(end is not None and end > 0 for end in ends)


def _of(report: Json, part: str, key: str) -> Any:
    return report[part][key] if report[part] else None
