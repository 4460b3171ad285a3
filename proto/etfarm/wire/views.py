"""Groupings of a report's operators by operator, op type, module, source line or backend. Pure; stdlib only.

Takes the rows of `REPORT["operators"]`. Every nanosecond counts once: a delegate with kernels is replaced by them and their REST,
and any other row counts itself; own shares therefore sum to 1, like those of the leaves. Where all kernels of a delegate are too
short for its clock, the delegate counts instead of the REST, which would be all of its time without a place. Times are sums of
means, which unlike medians add up: a row below the clock's resolution has no median, but contributes to a sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from etfarm.wire import timings
from etfarm.wire.errors import error_for

BY: Final = ("op", "type", "module", "line", "backend")
"""The possible groupings."""

SORTS: Final = ("own", "total", "name", "order")
"""The possible orders: largest own or total time first, by key, or as executed."""

NOT_EXPLAINED: Final = "not explained"
"""The key of REST rows: time that no operator accounts for. By backend, a delegate's rest belongs to its backend."""

NOT_DELEGATED: Final = "not delegated"
"""The backend of the runtime's own kernels."""

MODEL: Final = "the model itself"
"""The module of operators in no submodule: the model's own `forward`."""

INSERTED: Final = "inserted by the backend"
"""The module or line of kernels without an operator of the user's model, such as XNNPACK's transpositions."""

UNKNOWN: Final = "not known"
"""The module or line of rows that were not matched with the graph."""

_TIMES: Final = ("mean_ns", "p50_ns", "share", "mean_ci95_ns")
"""The keys of a row's time."""

_SHOWN_LINES: Final = 3
"""Number of lines that a delegate is named by."""

_NUMBER = re.compile(r" #\d+$")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """The rows with a common key. A time or share is None if not measured, as for a module without own rows."""

    key: str
    detail: str
    """A line's code; for an operator, backend or module, its op types; empty otherwise."""
    rows: int
    own_ns: float | None
    own_share: float | None
    """Fraction of the time, 0 to 1; own shares sum to 1 over all groups."""
    total_ns: float | None
    total_share: float | None
    """Own share plus those of all submodules; equal to the own share in other groupings."""
    depth: int
    """Depth in the tree of modules, from 0; 0 in other groupings."""
    indexes: tuple[int, ...]
    """`index` of the own rows, in order of execution."""
    own_ci95_ns: tuple[float, float] | None
    """95 % interval of `own_ns`, as wide as those of the rows together; None if a row with a time has none."""
    total_ci95_ns: tuple[float, float] | None
    """95 % interval of `total_ns`, likewise."""


def group(operators: Sequence[Row], by: str, sort: str = "own", *, modules: Iterable[str] = ()) -> tuple[Group, ...]:
    """Return the groups of a report's operators.

    Modules form a tree in depth-first order, `layer1` directly before its submodules; a module without operators is included if
    a submodule has operators. Siblings are sorted; equal ones are in order of execution.

    Args:
        operators: rows as `REPORT["operators"]` has them.
        by: one of BY.
        sort: one of SORTS.
        modules: paths to include in the tree of modules even without operators, such as those of modules with weights.

    Raises:
        BAD_VIEW: `by` or `sort` is unknown.
    """
    check(by, sort)
    parents = {row["index"]: row for row in operators if row["kind"] == "DELEGATE"}
    kernels = _by_parent(operators)
    keys = _KEYS[by]
    nodes: dict[str, _Node] = {}
    for row in leaves(operators):
        key = keys(row, parents.get(row["parent"]))
        if by == "line" and row["kind"] == "DELEGATE" and not row["source"]:
            key = _lines(kernels.get(row["index"], ())) or key
        nodes.setdefault(key, _Node(key)).rows.append(row)
    if by != "module":
        return tuple(node.group(_detail(node, by), 0) for node in _sorted(nodes.values(), sort))
    for path in modules:
        nodes.setdefault(path, _Node(path))
    return tuple(_depth_first(_tree(nodes), sort, 0))


def check(by: str, sort: str) -> None:
    """Validate the arguments of `group` before there are operators.

    Raises:
        BAD_VIEW: `by` or `sort` is unknown.
    """
    if by not in BY:
        raise error_for("BAD_VIEW", f"Operators cannot be grouped by {by!r}.", f"Give one of {', '.join(BY)}.", by=by)
    if sort not in SORTS:
        raise error_for("BAD_VIEW", f"Operators cannot be sorted by {sort!r}.", f"Give one of {', '.join(SORTS)}.", sort=sort)


def leaves(operators: Iterable[Row]) -> list[Row]:
    """Return the rows that count, in order of execution.

    These are all except delegates with child rows. A delegate whose kernels are all too short to measure stands for their REST.
    """
    rows = sorted(operators, key=lambda row: row["index"])
    children = _by_parent(rows)
    rests = {parent: rest for parent, below in children.items() if (rest := _unresolved_rest(below)) is not None}
    replaced = {rest["index"] for rest in rests.values()}
    counted: list[Row] = []
    for row in rows:
        if (rest := rests.get(row["index"])) is not None:
            counted.append({**row, **{name: rest[name] for name in _TIMES}})
        elif row["index"] not in children and row["index"] not in replaced:
            counted.append(row)
    return counted


def _by_parent(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Return the rows below each delegate, by its index."""
    children: dict[int, list[Row]] = {}
    for row in rows:
        if row["parent"] is not None:
            children.setdefault(row["parent"], []).append(row)
    return children


def _unresolved_rest(rows: Sequence[Row]) -> Row | None:
    """Return the REST below a delegate if none of its kernels has a time; else None."""
    rests, kernels = ([row for row in rows if (row["kind"] == "REST") is is_rest] for is_rest in (True, False))
    if len(rests) != 1 or not kernels or any(row["share"] or row["mean_ns"] for row in kernels):
        return None
    return rests[0]


def operator_name(row: Row) -> str:
    """Return a row's name without the number that XNNPACK adds to kernels of the same name: `Convolution (NHWC, F32) IGEMM`."""
    name = str(row["name"])
    return _NUMBER.sub("", name) if row["kind"] == "KERNEL" else name


def line_of(row: Row) -> str | None:
    """Return a row's line of user code, such as `models/net.py:31`; None if unknown."""
    source = row["source"]
    return f"{source['file']}:{source['line']}" if source else None


@dataclass
class _Node:
    """A group under construction."""

    key: str
    rows: list[Row] = field(default_factory=list)
    below: list[_Node] = field(default_factory=list)

    def own(self, name: str) -> float | None:
        return _sum(row[name] for row in self.rows)

    def total(self, name: str) -> float | None:
        return _sum([self.own(name), *(node.total(name) for node in self.below)])

    def first(self) -> float:
        return min([row["index"] for row in self.rows[:1]] + [node.first() for node in self.below], default=math.inf)

    def group(self, detail: str, depth: int) -> Group:
        own_ns, own_share, total_ns, total_share = (
            part(name) for part in (self.own, self.total) for name in ("mean_ns", "share")
        )
        indexes = tuple(row["index"] for row in self.rows)
        everything = list(self.everything())
        return Group(
            self.key, detail, len(self.rows), own_ns, own_share, total_ns, total_share, depth, indexes,
            interval(own_ns, self.rows), interval(total_ns, everything),
        )  # fmt: skip

    def everything(self) -> Iterator[Row]:
        yield from self.rows
        for node in self.below:
            yield from node.everything()


def half_width(rows: Iterable[Row]) -> float | None:
    """Return half the width of the 95 % interval of the rows' total time, ns; None if a row with a time has no interval.

    It is the sum of the rows' own: rows vary in step when the clock does, and a sum is never less certain than that. What a
    delegate's clock rounds is not in it.
    """
    timed = [row for row in rows if row["mean_ns"]]
    if any(row["mean_ci95_ns"] is None for row in timed):
        return None
    return sum(max(0.0, _half_of(row) - _rounding_of(row)) for row in timed)


def _half_of(row: Row) -> float:
    low, high = row["mean_ci95_ns"]
    # The lower end is never below 0.
    return float(max(row["mean_ns"] - low, high - row["mean_ns"]))


def _rounding_of(row: Row) -> float:
    return row.get("rounding_ns") or 0.0


def combine_roundings(roundings_ns: Iterable[float]) -> float:
    """Return by how much a sum is off in 95 % of cases, ns, if its terms are off by up to these, evenly and independently."""
    known = list(roundings_ns)
    return min(sum(known), timings.NORMAL_QUANTILE * math.sqrt(sum(each**2 for each in known) / 3))


def interval(time_ns: float | None, rows: Iterable[Row]) -> tuple[float, float] | None:
    """Return the 95 % interval of `time_ns`, the total time of rows, with what a delegate's clock rounds."""
    known = list(rows)
    half_ns = half_width(known)
    if not time_ns or half_ns is None:
        return None
    half_ns += combine_roundings(map(_rounding_of, known))
    return max(0.0, time_ns - half_ns), time_ns + half_ns


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _operator(row: Row, parent: Row | None) -> str:
    return NOT_EXPLAINED if row["kind"] == "REST" else operator_name(row)


def _type(row: Row, parent: Row | None) -> str:
    """Return the op types of the user's graph; the kernel's name if it has none, such as for an inserted transposition."""
    return " + ".join(row["op_types"]) or _operator(row, parent)


def _module(row: Row, parent: Row | None) -> str:
    if row["kind"] == "REST":
        return NOT_EXPLAINED
    # A kernel without operators of its own, unmatched or inserted, has the module of its delegate.
    module = row["module"] or (parent["module"] if parent and not row["op_types"] else None)
    if module:
        return str(module)
    if row["kind"] == "DELEGATE" and len(row["sources"] or ()) > 1:
        # It stands for kernels of several modules, none of which has a time.
        return NOT_EXPLAINED
    return MODEL if row["source"] or row["op_types"] else _without_origin(row)


def _line(row: Row, parent: Row | None) -> str:
    if row["kind"] == "REST":
        return NOT_EXPLAINED
    return line_of(row) or (f"module {row['module']}" if row["module"] else _without_origin(row))


def _lines(kernels: Iterable[Row]) -> str:
    """Return the lines of a delegate's kernels, `net.py:8 + net.py:9`; empty without any."""
    lines = list(dict.fromkeys(line for row in kernels if (line := line_of(row)) is not None))
    more = [f"{len(lines) - _SHOWN_LINES} more"] if len(lines) > _SHOWN_LINES else []
    return " + ".join([*lines[:_SHOWN_LINES], *more])


def _without_origin(row: Row) -> str:
    return INSERTED if row["aligned"] and not row["op_types"] else UNKNOWN


def _backend(row: Row, parent: Row | None) -> str:
    if row["delegated"]:
        return str(row["backend"] or UNKNOWN)
    return NOT_EXPLAINED if row["kind"] == "REST" else NOT_DELEGATED


_KEYS: Final[dict[str, Callable[[Row, Row | None], str]]] = {
    "op": _operator,
    "type": _type,
    "module": _module,
    "line": _line,
    "backend": _backend,
}


def _detail(node: _Node, by: str) -> str:
    if by == "type":
        return ""
    if by == "line":
        codes = [row["source"]["code"].strip() for row in node.rows if row["source"] and row["source"]["code"]]
        return codes[0] if codes else ""
    return ", ".join(dict.fromkeys(name for row in node.rows for name in row["op_types"]))


def _tree(nodes: Mapping[str, _Node]) -> list[_Node]:
    """Return the roots of the tree of modules. Keys that are not paths have no dots, and so are roots without children."""
    all_nodes = dict(nodes)
    for path in nodes:
        names = path.split(".")
        for depth in range(1, len(names)):
            above = ".".join(names[:depth])
            all_nodes.setdefault(above, _Node(above))
    top: list[_Node] = []
    for path, node in all_nodes.items():
        above = path.rpartition(".")[0]
        (all_nodes[above].below if above else top).append(node)
    return top


def _sorted(nodes: Iterable[_Node], sort: str) -> list[_Node]:
    in_order = sorted(nodes, key=_Node.first)
    if sort == "name":
        return sorted(in_order, key=lambda node: node.key)
    if sort == "order":
        return in_order
    part = _Node.own if sort == "own" else _Node.total
    return sorted(in_order, key=lambda node: (-(part(node, "share") or 0.0), -(part(node, "mean_ns") or 0.0)))


def _depth_first(nodes: Iterable[_Node], sort: str, depth: int) -> Iterator[Group]:
    for node in _sorted(nodes, sort):
        yield node.group(_detail(node, "module"), depth)
        yield from _depth_first(node.below, sort, depth + 1)
