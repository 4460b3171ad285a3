"""Which operators got slower, came or went: rows of two traced passes, matched by what they compute.

Never by name: a kernel's depends on the CPU.
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
    """Rows of both sides that stand for the same; those of one side are none where it lacks them."""

    base: Sequence[Json]
    candidate: Sequence[Json]


@dataclass
class _Matching:
    base: list[Json]
    candidate: list[Json]
    found: list[_Matched] = field(default_factory=list)

    def match(self, key: Key) -> None:
        """Moves rows with equal keys to `found`: one by one in order where both sides have as many, else all together."""
        groups: tuple[dict[Hashable, list[Json]], ...] = (defaultdict(list), defaultdict(list))
        for rows, by_key in zip((self.base, self.candidate), groups, strict=True):
            for row in rows:
                by_key[key(row)].append(row)
        of_base, of_candidate = groups
        both = {one: None for one in of_base if one is not None and one in of_candidate}
        for one in both:
            rows, others = of_base[one], of_candidate[one]
            if len(rows) == len(others):
                self.found += [_Matched([row], [other]) for row, other in zip(rows, others, strict=True)]
            else:
                self.found.append(_Matched(rows, others))
        self.base = [row for row in self.base if key(row) not in both]
        self.candidate = [row for row in self.candidate if key(row) not in both]


def operators(base: Json, candidate: Json) -> Json | None:
    """The operators part of a PAIR; None where a side was not traced.

    Programs of the same export (model, recipe and what made them) are matched by debug handle with module and op types, as far as
    that goes; others by module, code of the source line (whose number moves when the file above is edited) and op types, then by
    module and op types in their order. Where recipes differ operators are grouped otherwise by each, and modules are compared.
    Where kernels of a delegate of either side were not matched with the graph, delegates are compared as wholes.
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
        found = _grouped(known[0], known[1])
    else:
        if _same_export(base, candidate):
            matching.match(_handles)
        matching.match(_line)
        matching.match(_module)
        found = (
            matching.found + [_Matched([row], ()) for row in matching.base] + [_Matched((), [row]) for row in matching.candidate]
        )
    rows = [_row("OPERATOR", one, base, candidate) for one in found]
    rows += [
        _row(kind, _Matched(of_base, of_candidate), base, candidate)
        for kind, (of_base, of_candidate) in (("UNATTRIBUTED", unknown), ("REST", rests))
        if of_base or of_candidate
    ]
    rows.sort(key=lambda row: -abs(row["change_ns"] or 0.0))
    return {"by": "MODULE" if by_module else "OPERATOR", "rows": rows}


def _leaves(rows: Iterable[Json], *, whole_delegates: bool) -> list[Json]:
    """Every nanosecond once: a delegate that told its kernels is left out for them, or they for it."""
    rows = list(rows)
    if whole_delegates:
        return [row for row in rows if row["parent"] is None]
    parents = {row["parent"] for row in rows if row["parent"] is not None}
    return [row for row in rows if row["index"] not in parents]


def _known(rows: Sequence[Json]) -> tuple[list[Json], list[Json]]:
    """The rows that say what they compute, and those that do not, as kernels that a delegate did not name or put in itself."""
    told = [row for row in rows if row["kind"] != "REST"]
    known = [row for row in told if row["op_types"] or row["module"] is not None or row["source"]]
    return known, [row for row in told if not (row["op_types"] or row["module"] is not None or row["source"])]


def _grouped(base: Sequence[Json], candidate: Sequence[Json]) -> list[_Matched]:
    groups: dict[Hashable, tuple[list[Json], list[Json]]] = {}
    for place, rows in enumerate((base, candidate)):
        for row in rows:
            groups.setdefault(_place(row), ([], []))[place].append(row)
    return [_Matched(*rows) for rows in groups.values()]


def _same_export(base: Json, candidate: Json) -> bool:
    """Whether debug handles mean the same on both sides: lowering numbers them anew each time, and equally for the same."""

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
    """The module; of an operator in none the code of its line, else what it computes."""
    if row["module"] is not None:
        return "module", row["module"]
    return ("line", row["source"]["code"]) if row["source"] else ("types", tuple(row["op_types"]))


def _row(kind: str, found: _Matched, base: Json, candidate: Json) -> Json:
    every = [*found.base, *found.candidate]
    first = every[0]
    # What all of them share is said of them together.
    types = list(dict.fromkeys(name for row in every for name in row["op_types"]))
    lines = {(row["source"]["file"], row["source"]["line"]) for row in every if row["source"]}
    newest = next((row["source"] for row in (*found.candidate, *found.base) if row["source"]), None)
    one_line = newest if len(lines) == 1 or (len(found.base) <= 1 and len(found.candidate) <= 1) else None
    times = _time(found.base, base), _time(found.candidate, candidate)
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
    """A TIME: what the rows took together of a typical traced execution, which is that of the median."""
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
    """candidate - base; what one side lacks altogether took nothing there."""
    values = [0.0 if side is None else side[key] for side in (base, candidate)]
    return None if None in values else values[1] - values[0]
