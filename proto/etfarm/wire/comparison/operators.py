"""The comparison of operators: rows of two traced passes, matched by what they compute.

Rows are never matched by name, since a kernel's name depends on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from etfarm.wire.report import Json

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
    return {
        "kind": kind,
        "module": first["module"] if kind == "OPERATOR" else None,
        "op_types": types,
        "source": one_line if kind == "OPERATOR" else None,
        "base": times[0],
        "candidate": times[1],
        "change_ns": change,
        "change_share": _difference(times[0], times[1], "share"),
    }


def _time(rows: Sequence[Json], report: Json) -> Json | None:
    """Return a TIME: the total time of the rows in a typical traced execution, the median one."""
    if not rows:
        return None
    shares = [row["share"] for row in rows]
    share = None if None in shares else sum(shares)
    whole_ns = report["profile"]["p50_ns"] if report["profile"] else None
    if share is not None and whole_ns is not None:
        time_ns: float | None = share * whole_ns
    else:
        means = [row["mean_ns"] for row in rows]
        time_ns = None if None in means else sum(means)
    name = rows[0]["name"] if len(rows) == 1 else None
    return {"name": name, "indexes": [row["index"] for row in rows], "time_ns": time_ns, "share": share}


def _difference(base: Json | None, candidate: Json | None, key: str) -> float | None:
    """Return candidate - base; rows that a side lacks entirely took 0 ns there."""
    values = [0.0 if side is None else side[key] for side in (base, candidate)]
    return None if None in values else values[1] - values[0]
