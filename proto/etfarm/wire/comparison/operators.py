"""The comparison of operators: rows of two traced passes, matched by what they compute.

Rows are never matched by name, since a kernel's name depends on the CPU.

Changes have intervals. Each combines the variation within both traced passes with that between runs, which affects an operator at
least as much as the whole program, and with the rounding of a delegate's clock. As for latencies, Student's distribution accounts
for the number of runs. "No difference" is an answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from etfarm.wire import timings, views
from etfarm.wire.comparison import uncertainty
from etfarm.wire.report import Json

_ROUNDING: Final = 1 / math.sqrt(12)
"""Standard deviation of an error that is uniform within one unit of a clock."""

Key = Callable[[Json], Hashable | None]


@dataclass(frozen=True)
class _Matched:
    """Rows of both sides that correspond to each other; empty on a side that lacks them."""

    base: Sequence[Json]
    candidate: Sequence[Json]


@dataclass
class _Matching:
    base: list[Json]
    candidate: list[Json]
    matches: list[_Matched] = field(default_factory=list)

    def match(self, key: Key) -> None:
        """Move rows with equal keys to `matches`: pairwise in order if both sides have equally many, else as one group."""
        groups: tuple[dict[Hashable, list[Json]], ...] = (defaultdict(list), defaultdict(list))
        for rows, by_key in zip((self.base, self.candidate), groups, strict=True):
            for row in rows:
                by_key[key(row)].append(row)
        of_base, of_candidate = groups
        both = {shared: None for shared in of_base if shared is not None and shared in of_candidate}
        for shared in both:
            rows, others = of_base[shared], of_candidate[shared]
            if len(rows) == len(others):
                self.matches += [_Matched([row], [other]) for row, other in zip(rows, others, strict=True)]
            else:
                self.matches.append(_Matched(rows, others))
        self.base = [row for row in self.base if key(row) not in both]
        self.candidate = [row for row in self.candidate if key(row) not in both]


def operators(base: Json, candidate: Json) -> Json | None:
    """Return the operators part of a PAIR; None if a side was not traced.

    Programs of the same export (model, recipe and tools) are first matched by debug handle, module and op types. Remaining rows
    are matched by module, code of the source line (its number changes when the file is edited) and op types, then by module and
    op types in order. If recipes differ, they group operators differently, and modules are compared. If kernels of a delegate on
    either side were not matched with the graph, delegates are compared as a whole.
    """
    if not (base["operators"] and candidate["operators"]):
        return None
    traced = [report["operators"] for report in (base, candidate)]
    whole = any(row["aligned"] is False for rows in traced for row in rows)
    sides = [_leaves(rows, whole_delegates=whole) for rows in traced]
    rests = [[row for row in rows if row["kind"] == "REST"] for rows in sides]
    by_module = base["recipe_digest"] != candidate["recipe_digest"]
    known, unknown = zip(*(_known(rows) for rows in sides), strict=True)
    matching = _Matching(*known)
    if by_module:
        matched = _grouped(known[0], known[1])
    else:
        if _same_export(base, candidate):
            matching.match(_handles)
        matching.match(_line)
        matching.match(_module)
        matched = (
            matching.matches
            + [_Matched([row], ()) for row in matching.base]
            + [_Matched((), [row]) for row in matching.candidate]
        )
    rows = [_row("OPERATOR", group, base, candidate) for group in matched]
    rows += [
        _row(kind, _Matched(of_base, of_candidate), base, candidate)
        for kind, (of_base, of_candidate) in (("UNATTRIBUTED", unknown), ("REST", rests))
        if of_base or of_candidate
    ]
    rows.sort(key=lambda row: -abs(row["change_ns"] or 0.0))
    return {"by": "MODULE" if by_module else "OPERATOR", "rows": rows}


def _leaves(rows: Iterable[Json], *, whole_delegates: bool) -> list[Json]:
    """Return rows that count every nanosecond once: either a delegate or its kernels."""
    rows = list(rows)
    if whole_delegates:
        return [row for row in rows if row["parent"] is None]
    parents = {row["parent"] for row in rows if row["parent"] is not None}
    return [row for row in rows if row["index"] not in parents]


def _known(rows: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """Return the rows with a known origin, and those without, such as kernels that a delegate inserted or did not report."""
    measured = [row for row in rows if row["kind"] != "REST"]
    known = [row for row in measured if row["op_types"] or row["module"] is not None or row["source"]]
    return known, [row for row in measured if not (row["op_types"] or row["module"] is not None or row["source"])]


def _grouped(base: Sequence[Json], candidate: Sequence[Json]) -> list[_Matched]:
    groups: dict[Hashable, tuple[list[Json], list[Json]]] = {}
    for place, rows in enumerate((base, candidate)):
        for row in rows:
            groups.setdefault(_place(row), ([], []))[place].append(row)
    return [_Matched(*rows) for rows in groups.values()]


def _same_export(base: Json, candidate: Json) -> bool:
    """Return whether both sides share debug handles: lowering numbers them deterministically for equal inputs."""

    def of(report: Json) -> tuple[Any, ...]:
        tools = (report["compile"] or {}).get("toolchain") or {}
        model = report["model"]["digest"] if report["model"] else None
        return model, report["recipe_digest"], tools.get("torch"), tools.get("executorch"), tools.get("torchao")

    return of(base) == of(candidate) and of(base)[0] is not None


def _handles(row: Json) -> Hashable | None:
    if not row["debug_handles"]:
        return None
    return tuple(row["debug_handles"]), row["module"], tuple(row["op_types"])


def _line(row: Json) -> Hashable | None:
    if not row["source"]:
        return None
    return row["module"], row["source"]["code"], tuple(row["op_types"])


def _module(row: Json) -> Hashable | None:
    return (row["module"], tuple(row["op_types"])) if row["op_types"] or row["module"] is not None else None


def _place(row: Json) -> Hashable:
    """Return the module; without one, the code of the source line, else the op types."""
    if row["module"] is not None:
        return "module", row["module"]
    return ("line", row["source"]["code"]) if row["source"] else ("types", tuple(row["op_types"]))


def _row(kind: str, matched: _Matched, base: Json, candidate: Json) -> Json:
    all_rows = [*matched.base, *matched.candidate]
    first = all_rows[0]
    # Fields that all rows share describe the group.
    types = list(dict.fromkeys(name for row in all_rows for name in row["op_types"]))
    lines = {(row["source"]["file"], row["source"]["line"]) for row in all_rows if row["source"]}
    newest = next((row["source"] for row in (*matched.candidate, *matched.base) if row["source"]), None)
    one_line = newest if len(lines) == 1 or (len(matched.base) <= 1 and len(matched.candidate) <= 1) else None
    times = _time(matched.base, base), _time(matched.candidate, candidate)
    change = _difference(times[0], times[1], "time_ns")
    if kind == "OPERATOR" and first["kind"] == "DELEGATE":
        kind = "DELEGATE"
    ends, outcome = _judge(change, matched, base, candidate)
    return {
        "kind": kind,
        "module": first["module"] if kind == "OPERATOR" else None,
        "op_types": types,
        "source": one_line if kind == "OPERATOR" else None,
        "base": times[0],
        "candidate": times[1],
        "change_ns": change,
        "change_share": _difference(times[0], times[1], "share"),
        "change_ci95_ns": ends,
        "outcome": outcome,
    }


def _time(rows: Sequence[Json], report: Json) -> Json | None:
    """Return a TIME: the total time of the rows in a typical traced execution."""
    if not rows:
        return None
    shares = [row["share"] for row in rows]
    share = None if None in shares else sum(shares)
    profile = report["profile"] or {}
    # Reports of 0.2 have no mean of the whole.
    whole_ns = profile["p50_ns"] if profile.get("mean_ns") is None and profile else profile.get("mean_ns")
    if share is not None and whole_ns is not None:
        time_ns: float | None = share * whole_ns
    else:
        means = [row["mean_ns"] for row in rows]
        time_ns = None if None in means else sum(means)
    ends = views.interval(time_ns, rows)
    return {
        "name": rows[0]["name"] if len(rows) == 1 else None,
        "indexes": [row["index"] for row in rows],
        "time_ns": time_ns,
        "share": share,
        "time_ci95_ns": None if ends is None else list(ends),
    }


def _judge(change: float | None, matched: _Matched, base: Json, candidate: Json) -> tuple[list[float] | None, str | None]:
    """Return the 95 % interval of a change and its outcome; None for operators that one side lacks."""
    if change is None or not (matched.base and matched.candidate):
        return None, None
    base_errors, candidate_errors = _errors(matched.base, base), _errors(matched.candidate, candidate)
    if base_errors is None or candidate_errors is None:
        return None, "too_few"
    half_ns = uncertainty.half_width(base_errors + candidate_errors)
    ends = [change - half_ns, change + half_ns]
    if ends[0] <= 0 <= ends[1]:
        return ends, "no_difference"
    if not (_is_reliable(base) and _is_reliable(candidate)):
        return ends, "inconclusive"
    return ends, "slower" if change > 0 else "faster"


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
    return errors + [(_ROUNDING * (row["resolution_ns"] or 0.0), math.inf) for row in rows]


def _is_reliable(report: Json) -> bool:
    """Return whether a report's traced pass is VALID, and how separate runs of its program vary was observed."""
    verdict = (report["profile"] or {}).get("verdict") or {}
    return verdict.get("status") == "VALID" and uncertainty.is_observed(report["run_spread"] or {})


def _difference(base: Json | None, candidate: Json | None, key: str) -> float | None:
    """Return candidate - base; rows that a side lacks entirely took 0 ns there."""
    values = [0.0 if side is None else side[key] for side in (base, candidate)]
    return None if None in values else values[1] - values[0]
