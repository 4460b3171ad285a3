"""The ratio of two median latencies, with its confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from etfarm.wire.comparison.numbers import finite, number, ratio
from etfarm.wire.report import Json

Interval = tuple[float, float]


@dataclass(frozen=True)
class Ratio:
    """The ratio of the candidate to the base, with its 95 % interval if it can be computed."""

    ratio: float
    ci95: Interval | None
    method: str
    """How the ratio was measured: paired or separate."""
    rounds: int | None = None
    process_pairs: int | None = None


def latency(base: Json, candidate: Json) -> Json | None:
    """Return the latency part of a PAIR; None if neither side measured a latency."""
    if not (base["latency"] or candidate["latency"]):
        return None
    comparison = compared(base, candidate)
    times = {key: number(_of(base, "latency", key), _of(candidate, "latency", key)) for key in ("p50_ns", "p90_ns", "p99_ns")}
    loads = ("load_ns", "load_method_ns", "first_run_ns")
    return {
        "ratio": comparison.ratio if comparison else None,
        "ratio_ci95": list(comparison.ci95) if comparison and comparison.ci95 else None,
        "method": comparison.method if comparison else None,
        "outcome": outcome(comparison) if comparison else None,
        "rounds": comparison.rounds if comparison else None,
        "process_pairs": comparison.process_pairs if comparison else None,
        **times,
        **{key: number(_of(base, "load", key), _of(candidate, "load", key)) for key in loads},
    }


def outcome(change: Ratio) -> str:
    """Return the outcome of a ratio: too_few, no_difference, faster or slower."""
    if change.ci95 is None:
        return "too_few"
    if change.ci95[0] <= 1 <= change.ci95[1]:
        return "no_difference"
    return "faster" if change.ratio < 1 else "slower"


def compared(base: Json, candidate: Json) -> Ratio | None:
    """Return the ratio of the medians, by rounds if the two took turns in one attempt; None if a side has no median."""
    return paired(base, candidate) or separate(base, candidate)


def separate(base: Json, candidate: Json) -> Ratio | None:
    """Return the ratio of two medians that were measured separately.

    Its interval treats the medians' intervals (from a block bootstrap) as independent, and adds the squares of their half-widths
    on a logarithmic scale, separately for each direction since they are not symmetric. It does not include the variation
    between runs at different times.
    """
    base_ns, candidate_ns = _of(base, "latency", "p50_ns"), _of(candidate, "latency", "p50_ns")
    value = ratio(base_ns, candidate_ns)
    if value is None or base_ns is None or candidate_ns is None:
        return None
    ends = _ends(base), _ends(candidate)
    if ends[0] is None or ends[1] is None:
        return Ratio(value, None, "separate")
    return _with_interval(value, _relative(base_ns, ends[0]), _relative(candidate_ns, ends[1]), "separate")


def paired(base: Json, candidate: Json) -> Ratio | None:
    """Return the ratio by rounds of one interleaved attempt; None if the two are from different attempts.

    The report of each later candidate has its ratio to the first candidate. For two later candidates, the result is the quotient
    of these ratios. Its interval treats them as independent; since they share the first candidate's noise, it is conservative.
    """
    if base["attempt"] is None or base["attempt"] != candidate["attempt"] or base["cell"] == candidate["cell"]:
        return None
    of_base, of_candidate = base["interleaved"], candidate["interleaved"]
    if of_candidate and of_candidate["base_cell"] == base["cell"]:
        return _from_interleaved(of_candidate["ratio"], of_candidate["ratio_ci95"], of_candidate)
    if of_base and of_base["base_cell"] == candidate["cell"]:
        ends = of_base["ratio_ci95"]
        inverted = [1 / ends[1], 1 / ends[0]] if _usable(ends) else None
        return _from_interleaved(ratio(of_base["ratio"], 1.0), inverted, of_base)
    if of_base and of_candidate and of_base["base_cell"] == of_candidate["base_cell"]:
        return _through_first(of_base, of_candidate)
    return None


def _through_first(of_base: Json, of_candidate: Json) -> Ratio | None:
    value = ratio(of_base["ratio"], of_candidate["ratio"])
    if value is None:
        return None
    rounds, pairs = (min(of_base[key], of_candidate[key]) for key in ("rounds", "process_pairs"))
    if not (_usable(of_base["ratio_ci95"]) and _usable(of_candidate["ratio_ci95"])):
        return Ratio(value, None, "paired", rounds, pairs)
    ends = [_relative(part["ratio"], tuple(part["ratio_ci95"])) for part in (of_base, of_candidate)]
    return _with_interval(value, ends[0], ends[1], "paired", rounds, pairs)


def _from_interleaved(value: float | None, ends: list[float] | None, interleaved: Json) -> Ratio | None:
    """Return the ratio of an interleaved report."""
    if value is None or ratio(1.0, value) is None:
        return None
    ci95 = (ends[0], ends[1]) if ends and _usable(ends) and all(map(math.isfinite, ends)) else None
    return Ratio(value, ci95, "paired", interleaved["rounds"], interleaved["process_pairs"])


def _with_interval(
    value: float, base: Interval, candidate: Interval, method: str, rounds: int | None = None, pairs: int | None = None
) -> Ratio:
    """Return a ratio with the interval that results from two independent intervals, as returned by `_relative`."""
    low = finite(value * math.exp(-math.hypot(candidate[0], base[1])))
    try:
        high = finite(value * math.exp(math.hypot(candidate[1], base[0])))
    except OverflowError:
        high = None
    return Ratio(value, None if low is None or high is None else (low, high), method, rounds, pairs)


def _relative(middle: float, ends: Interval) -> Interval:
    """Return the distances of an interval's ends below and above `middle`, as logarithms."""
    return max(0.0, math.log(middle) - math.log(ends[0])), max(0.0, math.log(ends[1]) - math.log(middle))


def _ends(report: Json) -> Interval | None:
    ends = _of(report, "latency", "p50_ci95_ns")
    return (ends[0], ends[1]) if _usable(ends) else None


def _usable(ends: list[float] | None) -> bool:
    return ends is not None and len(ends) == 2 and all(end is not None and end > 0 for end in ends)


def _of(report: Json, part: str, key: str) -> Any:
    return report[part][key] if report[part] else None
