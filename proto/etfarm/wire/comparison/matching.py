"""Which rows of two traced passes correspond to each other.

Rows of one program correspond by their index. Rows of different programs correspond by the part of the model that they compute; a
kernel's name, which depends on the CPU, only counts where nothing else is known: for programs without a graph, such as a .pte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from etfarm.v1 import comparison_pb2
from etfarm.wire import views
from etfarm.wire.report import Json

_REST: Final = "REST"

_Key = Callable[[Json], Hashable | None]


@dataclass(frozen=True)
class Matched:
    """Rows of both sides that correspond to each other; empty on a side that lacks them."""

    base: Sequence[Json]
    candidate: Sequence[Json]
    kind: comparison_pb2.OperatorChangeKind.ValueType = comparison_pb2.OPERATOR_CHANGE_KIND_OPERATOR
    """OPERATOR; UNATTRIBUTED for kernels that compute no operator of the model, or REST."""


@dataclass(frozen=True)
class Matches:
    """All rows of two traced passes; each row is in one match."""

    rows: Sequence[Matched]
    matched_by: comparison_pb2.OperatorMatching.ValueType
    by: comparison_pb2.ChangedRows.ValueType = comparison_pb2.CHANGED_ROWS_OPERATOR


def match(base: Json, candidate: Json) -> Matches:
    """Return the corresponding rows of two REPORTs that were both traced.

    - One program, with equal digests: row by row by index, if both traces have the same rows.
    - A side whose rows have no module, source or type of operator: by name and order of occurrence, if a name occurs equally
      often on both sides, else all rows of a name together. Delegates of a backend are compared as a whole unless each of them,
      on both sides, has kernels.
    - One recipe: by debug handle, module and types of operators, if both are of the same export (model, recipe and tools).
      Remaining rows are matched by module, code of the source line (its number changes when the file is edited) and types, then
      by module and types in order. If kernels of a delegate on either side were not matched with the graph, delegates are
      compared as a whole.
    - Different recipes, which group operators differently: by module.
    """
    traced = base["operators"], candidate["operators"]
    if _is_same_program(base, candidate) and _has_same_rows(*traced):
        return Matches(_by_index(*traced), comparison_pb2.OPERATOR_MATCHING_INDEX)
    if not all(any(map(_is_known, _measured(rows))) for rows in traced):
        return Matches(_by_name(*traced), comparison_pb2.OPERATOR_MATCHING_NAME)
    whole = any(row["aligned"] is False for rows in traced for row in rows)
    sides = [_leaves(rows, () if whole else None) for rows in traced]
    known = [[row for row in _measured(rows) if _is_known(row)] for rows in sides]
    others = [[row for row in _measured(rows) if not _is_known(row)] for rows in sides]
    by_module = base["recipe_digest"] != candidate["recipe_digest"]
    if by_module:
        rows = _grouped(known[0], known[1], _place)
    else:
        rows = _by_graph(known[0], known[1], share_handles=_is_same_export(base, candidate))
    return Matches(
        [*rows, *_present(Matched(others[0], others[1], comparison_pb2.OPERATOR_CHANGE_KIND_UNATTRIBUTED)), *_rest(*sides)],
        comparison_pb2.OPERATOR_MATCHING_GRAPH,
        comparison_pb2.CHANGED_ROWS_MODULE if by_module else comparison_pb2.CHANGED_ROWS_OPERATOR,
    )


def _by_index(base: Sequence[Json], candidate: Sequence[Json]) -> list[Matched]:
    sides = [_leaves(rows) for rows in (base, candidate)]
    measured = [_measured(rows) for rows in sides]
    has_graph = any(_is_known(row) for rows in measured for row in rows)
    rows = []
    for row, other in zip(*measured, strict=True):
        is_inserted = has_graph and row["kind"] == "KERNEL" and not (_is_known(row) or _is_known(other))
        kind = comparison_pb2.OPERATOR_CHANGE_KIND_UNATTRIBUTED if is_inserted else comparison_pb2.OPERATOR_CHANGE_KIND_OPERATOR
        rows.append(Matched([row], [other], kind))
    return [*rows, *_rest(*sides)]


def _by_name(base: Sequence[Json], candidate: Sequence[Json]) -> list[Matched]:
    divided = _divided_backends(base) & _divided_backends(candidate)
    sides = [_leaves(rows, divided) for rows in (base, candidate)]
    rows: list[Matched] = []
    for group in _grouped(_measured(sides[0]), _measured(sides[1]), _name):
        rows += _in_order(group.base, group.candidate)
    return [*rows, *_rest(*sides)]


def _divided_backends(rows: Sequence[Json]) -> set[str | None]:
    """Return the backends that reported the kernels of all of their delegates.

    Kernels of one side cannot be compared with a delegate of the other that has none, nor with nothing.
    """
    parents = {row["parent"] for row in rows if row["kind"] == "KERNEL"}
    whole = {row["backend"] for row in rows if row["kind"] == "DELEGATE" and row["index"] not in parents}
    return {row["backend"] for row in rows if row["kind"] == "DELEGATE"} - whole


def _by_graph(base: Sequence[Json], candidate: Sequence[Json], *, share_handles: bool) -> list[Matched]:
    matching = _Matching(list(base), list(candidate))
    if share_handles:
        matching.match(_handles)
    matching.match(_line)
    matching.match(_module)
    return matching.matches + [Matched([row], ()) for row in matching.base] + [Matched((), [row]) for row in matching.candidate]


@dataclass
class _Matching:
    base: list[Json]
    candidate: list[Json]
    matches: list[Matched] = field(default_factory=list)

    def match(self, key: _Key) -> None:
        """Move rows with equal keys to `matches`: pairwise in order if both sides have equally many, else as one group."""
        groups: tuple[dict[Hashable, list[Json]], ...] = (defaultdict(list), defaultdict(list))
        for rows, by_key in zip((self.base, self.candidate), groups, strict=True):
            for row in rows:
                by_key[key(row)].append(row)
        of_base, of_candidate = groups
        both = {shared: None for shared in of_base if shared is not None and shared in of_candidate}
        for shared in both:
            self.matches += _in_order(of_base[shared], of_candidate[shared])
        self.base = [row for row in self.base if key(row) not in both]
        self.candidate = [row for row in self.candidate if key(row) not in both]


def _in_order(base: Sequence[Json], candidate: Sequence[Json]) -> list[Matched]:
    """Return rows that are alike: pairwise in order if both sides have equally many, else as one group."""
    if len(base) == len(candidate):
        return [Matched([row], [other]) for row, other in zip(base, candidate, strict=True)]
    return [Matched(base, candidate)]


def _grouped(base: Sequence[Json], candidate: Sequence[Json], key: _Key) -> list[Matched]:
    groups: dict[Hashable, tuple[list[Json], list[Json]]] = {}
    for place, rows in enumerate((base, candidate)):
        for row in rows:
            groups.setdefault(key(row), ([], []))[place].append(row)
    return [Matched(*rows) for rows in groups.values()]


def _rest(base: Sequence[Json], candidate: Sequence[Json]) -> list[Matched]:
    rests = [[row for row in rows if row["kind"] == _REST] for rows in (base, candidate)]
    return _present(Matched(rests[0], rests[1], comparison_pb2.OPERATOR_CHANGE_KIND_REST))


def _present(matched: Matched) -> list[Matched]:
    return [matched] if matched.base or matched.candidate else []


def _leaves(rows: Iterable[Json], divided: Collection[str | None] | None = None) -> list[Json]:
    """Return rows that count every nanosecond once: either a delegate or its kernels.

    Args:
        divided: the backends whose delegates are divided into kernels; None for all.
    """
    rows = list(rows)
    whole = {row["index"] for row in rows if row["kind"] == "DELEGATE" and divided is not None and row["backend"] not in divided}
    left = [row for row in rows if row["parent"] not in whole]
    parents = {row["parent"] for row in left if row["parent"] is not None}
    return [row for row in left if row["index"] not in parents]


def _measured(rows: Iterable[Json]) -> list[Json]:
    return [row for row in rows if row["kind"] != _REST]


def _is_known(row: Json) -> bool:
    """Return whether the origin of a row is known; not, for example, of a kernel that a delegate inserted or did not report."""
    return bool(row["op_types"] or row["module"] is not None or row["source"])


def _is_same_program(base: Json, candidate: Json) -> bool:
    """Return whether both sides ran one method of one program."""
    digests = [((report["compile"] or {}).get("program") or {}).get("digest") for report in (base, candidate)]
    return bool(digests[0]) and digests[0] == digests[1] and base["method"] == candidate["method"]


def _has_same_rows(base: Sequence[Json], candidate: Sequence[Json]) -> bool:
    """Return whether two tables have the same structure. A processor may need other kernels of a delegate than another one."""
    if len(base) != len(candidate):
        return False
    for row, other in zip(base, candidate, strict=True):
        if any(row[key] != other[key] for key in ("index", "kind", "parent")):
            return False
        # A side without the graph has neither.
        if any(row[key] and other[key] and row[key] != other[key] for key in ("debug_handles", "op_types")):
            return False
    return True


def _is_same_export(base: Json, candidate: Json) -> bool:
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


def _name(row: Json) -> Hashable:
    """Return the kernel's name without its number, which counts kernels of one name."""
    return row["kind"], row["backend"], views.operator_name(row)
