"""The ratio of two median latencies, with its confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from etfarm.v1 import comparison_pb2
from etfarm.wire.comparison import uncertainty
from etfarm.wire.comparison.numbers import count, finite, measure, ratio
from etfarm.wire.comparison.uncertainty import Interval
from etfarm.wire.messages import fill
from etfarm.wire.report import Json

OBVIOUS: Final = 2.5
"""Ratio beyond which separate runs differ, even if it is not known how much they vary.

VALID processes of one program on a virtual machine differed by up to 1.9: a neighbour on the other hardware thread of the same
core can take half of it, which nothing inside the machine shows.
"""


STEADY: Final = 0.03
"""Relative standard deviation up to which separate runs are steady: a difference beyond their 95 % interval is one.

Runs that vary more do so by neighbours and layouts of memory, for minutes or a whole process, which 5 repeats sample badly: of 40
pairs of equal programs beside changing load, 2 were outside of the 95 % interval. A difference must be beyond the 99 % one there.
"""

_QUANTILE_99: Final = 2.575829
"""The 99.5 % quantile of the normal distribution, which the 99 % interval reaches."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of the candidate to the base, with its 95 % interval if it can be computed."""

    ratio: float
    ci95: Interval | None
    is_paired: bool
    """Whether it is a ratio of rounds, not one of separate runs."""
    is_observed: bool = True
    """Whether the variation between runs was observed on both sides; else the interval may be too narrow."""
    is_doubtful: bool = False
    """Whether runs are not steady, and their 99 % interval includes 1."""
    rounds: int = 0
    process_pairs: int = 0


def latency(base: Json, candidate: Json) -> comparison_pb2.LatencyChange | None:
    """Return the change of the latency; None if neither side measured one."""
    if not (base["latency"] or candidate["latency"]):
        return None
    times = [[_of(report, "latency", key) for report in (base, candidate)] for key in ("p50_ns", "p90_ns", "p99_ns")]
    loads = [[_of(report, "load", key) for report in (base, candidate)] for key in ("load_ns", "load_method_ns", "first_run_ns")]
    same_program = is_same_program(base, candidate)
    change = comparison_pb2.LatencyChange(
        p50_ns=measure(*times[0]),
        p90_ns=measure(*times[1]),
        p99_ns=measure(*times[2]),
        load_ns=count(*loads[0]),
        load_method_ns=count(*loads[1]),
        first_run_ns=count(*loads[2]),
        same_program=same_program,
    )
    if (compared := paired(base, candidate) or separate(base, candidate)) is None:
        return change
    change.ratio = compared.ratio
    change.ratio_ci95.extend(compared.ci95 or ())
    change.outcome = outcome(compared, same_program=same_program)
    if compared.is_paired:
        change.method = comparison_pb2.RATIO_METHOD_PAIRED
        change.rounds, change.process_pairs = compared.rounds, compared.process_pairs
        return change
    change.method = comparison_pb2.RATIO_METHOD_SEPARATE
    for spread, report in ((change.base_spread, base), (change.candidate_spread, candidate)):
        if report["run_spread"]:
            fill(spread, report["run_spread"])
    return change


def is_same_program(base: Json, candidate: Json) -> bool:
    """Return whether two reports ran the same program on the same inputs, with equal method, runner, threads and cores.

    Programs with an unknown digest are different.
    """
    execution = _execution(base)
    return execution is not None and execution == _execution(candidate)


def _execution(report: Json) -> tuple[Any, ...] | None:
    """Return what determines the execution of a program apart from the device; None if its digest is unknown."""
    program = _of(report, "compile", "program")
    if not program or not program["digest"]:
        return None
    runner = tuple(_of(report, "runner", key) for key in ("kind", "executorch", "bundle_digest", "cores"))
    return program["digest"], _of(report, "inputs", "digest"), report["method"], report["threads"], runner


def outcome(change: Ratio, *, same_program: bool = False) -> comparison_pb2.LatencyOutcome.ValueType:
    """Return the outcome of a ratio.

    A program is neither faster nor slower than itself: a difference that runs do not explain comes from their circumstances.
    """
    if change.ci95 is None:
        return comparison_pb2.LATENCY_OUTCOME_TOO_FEW
    if change.ci95[0] <= 1 <= change.ci95[1]:
        return comparison_pb2.LATENCY_OUTCOME_NO_DIFFERENCE
    if same_program or change.is_doubtful or (not change.is_observed and 1 / OBVIOUS < change.ratio < OBVIOUS):
        return comparison_pb2.LATENCY_OUTCOME_INCONCLUSIVE
    return comparison_pb2.LATENCY_OUTCOME_FASTER if change.ratio < 1 else comparison_pb2.LATENCY_OUTCOME_SLOWER


def separate(base: Json, candidate: Json) -> Ratio | None:
    """Return the ratio of two medians that were measured separately; None if a side has no median.

    Its interval covers what is known of the variation between runs, which may be an assumption.
    """
    of_base, of_candidate = uncertainty.estimate(base), uncertainty.estimate(candidate)
    if of_base is None or of_candidate is None:
        return None
    value = _exp(of_candidate.log_ns - of_base.log_ns)
    if not value:
        return None
    ends = uncertainty.interval(of_base, of_candidate)
    is_observed = of_base.is_observed and of_candidate.is_observed
    is_steady = max(of_base.spread, of_candidate.spread) <= STEADY
    wide = None if is_steady else uncertainty.interval(of_base, of_candidate, _QUANTILE_99)
    is_doubtful = wide is not None and wide[0] <= 0 <= wide[1]
    return Ratio(value, _exponentials(ends), False, is_observed, is_doubtful)


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
        inverted = [1 / ends[1], 1 / ends[0]] if uncertainty.is_usable(ends) else None
        return _from_interleaved(ratio(of_base["ratio"], 1.0), inverted, of_base)
    if of_base and of_candidate and of_base["base_cell"] == of_candidate["base_cell"]:
        return _through_first(of_base, of_candidate)
    return None


def _through_first(of_base: Json, of_candidate: Json) -> Ratio | None:
    value = ratio(of_base["ratio"], of_candidate["ratio"])
    if value is None:
        return None
    rounds, pairs = (min(of_base[key], of_candidate[key]) for key in ("rounds", "process_pairs"))
    if not (uncertainty.is_usable(of_base["ratio_ci95"]) and uncertainty.is_usable(of_candidate["ratio_ci95"])):
        return Ratio(value, None, True, rounds=rounds, process_pairs=pairs)
    low, high = (math.hypot(_distance(of_candidate, end), _distance(of_base, opposite)) for end, opposite in ((0, 1), (1, 0)))
    middle = math.log(value)
    return Ratio(value, _exponentials((middle - low, middle + high)), True, rounds=rounds, process_pairs=pairs)


def _distance(interleaved: Json, end: int) -> float:
    """Return how far an end of an interval, 0 or 1, is from the ratio in that direction, as a logarithm."""
    distance = math.log(interleaved["ratio_ci95"][end]) - math.log(interleaved["ratio"])
    return max(0.0, distance if end else -distance)


def _from_interleaved(value: float | None, ends: list[float] | None, interleaved: Json) -> Ratio | None:
    """Return the ratio of an interleaved report."""
    if value is None or ratio(1.0, value) is None:
        return None
    ci95 = (ends[0], ends[1]) if ends and uncertainty.is_usable(ends) and all(map(math.isfinite, ends)) else None
    return Ratio(value, ci95, True, rounds=interleaved["rounds"], process_pairs=interleaved["process_pairs"])


def _exponentials(ends: Interval | None) -> Interval | None:
    """Return the interval with these logarithms as its ends; None if JSON cannot represent it."""
    low, high = (_exp(end) for end in ends) if ends else (None, None)
    return None if low is None or high is None else (low, high)


def _exp(logarithm: float) -> float | None:
    """Return the exponential; None if JSON cannot represent it."""
    try:
        return finite(math.exp(logarithm))
    except OverflowError:
        return None


def _of(report: Json, part: str, key: str) -> Any:
    return report[part][key] if report[part] else None
