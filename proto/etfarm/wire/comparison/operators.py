"""The comparison of operators: the times of corresponding rows of two traced passes.

Changes have intervals. Each combines the variation within both traced passes with that between runs, which affects an operator at
least as much as the whole program, and with the rounding of a delegate's clock. As for latencies, Student's distribution accounts
for the number of runs. "No difference" is an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from etfarm.v1 import comparison_pb2, compile_pb2
from etfarm.wire import timings, views
from etfarm.wire.comparison import matching, uncertainty
from etfarm.wire.comparison.matching import Matched
from etfarm.wire.messages import fill
from etfarm.wire.report import Json

_EVEN: Final = 1 / math.sqrt(3)
"""Standard deviation of an error that is evenly distributed up to 1 either way."""


_COARSE_NS: Final = 1000.0
"""Resolution of clocks whose rounding matters."""


def operators(base: Json, candidate: Json) -> comparison_pb2.OperatorChanges | None:
    """Return the changes of operators; None if a side was not traced."""
    if not (base["operators"] and candidate["operators"]):
        return None
    matches = matching.match(base, candidate)
    rows = [_row(each, base, candidate) for each in matches.rows]
    rows.sort(key=lambda row: -abs(row.change_ns))
    return comparison_pb2.OperatorChanges(by=matches.by, rows=rows, matched_by=matches.matched_by)


def _row(matched: Matched, base: Json, candidate: Json) -> comparison_pb2.OperatorChange:
    kind, all_rows = matched.kind, [*matched.base, *matched.candidate]
    is_operator = kind == comparison_pb2.OPERATOR_CHANGE_KIND_OPERATOR
    # A side may lack the graph. Fields that all rows share describe the group.
    types = list(dict.fromkeys(name for row in all_rows for name in row["op_types"]))
    lines = {(row["source"]["file"], row["source"]["line"]) for row in all_rows if row["source"]}
    newest = next((row["source"] for row in (*matched.candidate, *matched.base) if row["source"]), None)
    one_line = newest if len(lines) == 1 or (len(matched.base) <= 1 and len(matched.candidate) <= 1) else None
    module = next((row["module"] for row in all_rows if row["module"] is not None), None)
    times = _time(matched.base, base), _time(matched.candidate, candidate)
    change = _difference(*map(_known_time, times))
    if is_operator and all_rows[0]["kind"] == "DELEGATE":
        kind, is_operator = comparison_pb2.OPERATOR_CHANGE_KIND_DELEGATE, False
    ends, outcome = _judge(change, matched, base, candidate)
    return comparison_pb2.OperatorChange(
        kind=kind,
        module=module if is_operator else None,
        op_types=types,
        source=fill(compile_pb2.SourceLine(), one_line) if is_operator and one_line else None,
        base=times[0],
        candidate=times[1],
        change_ns=change,
        change_share=_difference(*map(_known_share, times)),
        change_ci95_ns=ends,
        outcome=outcome,
    )


def _time(rows: Sequence[Json], report: Json) -> comparison_pb2.OperatorTime | None:
    """Return the total time of the rows in a typical traced execution; None without rows."""
    if not rows:
        return None
    names, shares = {views.operator_name(row) for row in rows}, [row["share"] for row in rows]
    share = None if None in shares else sum(shares)
    profile = report["profile"] or {}
    # Reports of before 0.3.0 have no mean of the whole.
    whole_ns = profile["p50_ns"] if profile.get("mean_ns") is None and profile else profile.get("mean_ns")
    if share is not None and whole_ns is not None:
        time_ns: float | None = share * whole_ns
    else:
        means = [row["mean_ns"] for row in rows]
        time_ns = None if None in means else sum(means)
    ends = views.interval(time_ns, rows)
    if not time_ns and all(row["mean_ns"] is None and row["resolution_ns"] for row in rows):
        # Nothing is known but that each takes less than a step of the clock.
        time_ns, ends = None, (0.0, sum(row["resolution_ns"] for row in rows))
    return comparison_pb2.OperatorTime(
        name=rows[0]["name"] if len(rows) == 1 else names.pop() if len(names) == 1 else None,
        indexes=[row["index"] for row in rows],
        time_ns=time_ns,
        share=share,
        time_ci95_ns=ends,
    )


def _judge(
    change: float | None, matched: Matched, base: Json, candidate: Json
) -> tuple[tuple[float, float] | None, comparison_pb2.OperatorOutcome.ValueType]:
    """Return the 95 % interval of a change and its outcome; neither for operators that one side lacks."""
    if change is None or not (matched.base and matched.candidate):
        return None, comparison_pb2.OPERATOR_OUTCOME_UNSPECIFIED
    base_errors, candidate_errors = _errors(matched.base, base), _errors(matched.candidate, candidate)
    if base_errors is None or candidate_errors is None:
        return None, comparison_pb2.OPERATOR_OUTCOME_TOO_FEW
    half_ns = uncertainty.half_width(base_errors + candidate_errors)
    ends = (change - half_ns, change + half_ns)
    if ends[0] <= 0 <= ends[1]:
        return ends, comparison_pb2.OPERATOR_OUTCOME_NO_DIFFERENCE
    is_alike = _lacks_half_steps(matched.base) == _lacks_half_steps(matched.candidate)
    if not (_is_reliable(base) and _is_reliable(candidate) and is_alike):
        return ends, comparison_pb2.OPERATOR_OUTCOME_INCONCLUSIVE
    return ends, comparison_pb2.OPERATOR_OUTCOME_SLOWER if change > 0 else comparison_pb2.OPERATOR_OUTCOME_FASTER


def _errors(rows: Sequence[Json], report: Json) -> list[tuple[float, float]] | None:
    """Return the standard errors of the rows' total time with their degrees of freedom; None if there is no interval.

    They are those within the traced pass, between runs, and by rounding. Only one run is traced, so repeats do not average.
    """
    within_ns = views.half_width(rows)
    if within_ns is None or any(row["share"] and row["mean_ns"] is None for row in rows):
        return None
    spread = report["run_spread"] or {}
    between_ns = (spread.get("relative_stddev") or 0.0) * sum(row["mean_ns"] or 0.0 for row in rows)
    freedom = spread["runs"] - 1.0 if uncertainty.is_observed(spread) else math.inf
    # The interval within the pass already accounts for the number of its iterations.
    errors = [(within_ns / timings.NORMAL_QUANTILE, math.inf), (between_ns, freedom)]
    return errors + [(_EVEN * _rounding(row), math.inf) for row in rows]


def _rounding(row: Json) -> float:
    """Return by how much a clock may have rounded a row's time, ns; half a step in reports that do not say it."""
    known = row.get("rounding_ns")
    return (row["resolution_ns"] or 0.0) / 2 if known is None else known


def _lacks_half_steps(rows: Sequence[Json]) -> bool:
    """Return whether rows are of a report in whose times a delegate's clock still rounds down on average."""
    return any(
        row["kind"] == "KERNEL"
        and (row["resolution_ns"] or 0.0) >= _COARSE_NS
        and row["mean_ns"]
        and row.get("rounding_ns") is None
        for row in rows
    )


def _is_reliable(report: Json) -> bool:
    """Return whether a report's traced pass is VALID, and how separate runs of its program vary was observed."""
    verdict = (report["profile"] or {}).get("verdict") or {}
    return verdict.get("status") == "VALID" and uncertainty.is_observed(report["run_spread"] or {})


def _known_time(side: comparison_pb2.OperatorTime | None) -> float | None:
    """Return a side's time, ns: the middle of rows below a clock's step, and 0 of those that it lacks."""
    if side is None:
        return 0.0
    if side.HasField("time_ns"):
        return side.time_ns
    return sum(side.time_ci95_ns) / 2 if side.time_ci95_ns else None


def _known_share(side: comparison_pb2.OperatorTime | None) -> float | None:
    """Return a side's share; rows that it lacks entirely took nothing there."""
    return 0.0 if side is None else side.share if side.HasField("share") else None


def _difference(base: float | None, candidate: float | None) -> float | None:
    return None if base is None or candidate is None else candidate - base
