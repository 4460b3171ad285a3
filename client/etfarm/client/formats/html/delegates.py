"""The picture of what runs where: a report's delegates, and the operators between them, in the order of execution.

These are pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.formats import answers, units
from etfarm.wire import delegation as delegations
from etfarm.wire import views

Json = Mapping[str, Any]

SHOWN_TYPES: Final = 4
"""Number of operator types that a step names."""

FEW_STEPS: Final = 4
"""Maximum number of steps that name all their operator types, as a program that is delegated whole has."""

SHOWN_PLACES: Final = 2
"""Number of source lines that a step outside of delegates names."""


@dataclass(frozen=True)
class Step:
    """One delegate's call, or consecutive operators of the runtime itself."""

    number: int
    """Position in the order of execution, from 1."""
    title: str
    """The backend, or `not delegated`."""
    delegated: bool
    size: str
    """`20 kernels`, `3 operators`."""
    types: Sequence[tuple[str, int | None]]
    """The most frequent operators of the graph with their counts; without counts if the backend does not report its kernels."""
    other_types: int
    """Number of types that `types` leaves out."""
    share: float | None
    time: str
    reads: Sequence[int]
    """Numbers of the steps whose outputs it takes, except the step before it."""
    places: Sequence[str]


def steps(report: Json) -> list[Step]:
    """Return the steps of one execution; empty if nothing was traced."""
    rows = [row for row in report["operators"] or () if row["kind"] != "REST"]
    kernels: dict[int, list[Json]] = {}
    for row in rows:
        if row["parent"] is not None:
            kernels.setdefault(row["parent"], []).append(row)
    groups: list[list[Json]] = []
    for row in rows:
        if row["parent"] is not None:
            continue
        if row["kind"] == "DELEGATE" or not groups or groups[-1][0]["kind"] == "DELEGATE":
            groups.append([])
        groups[-1].append(row)
    number_of = {
        row["index"]: number
        for number, group in enumerate(groups, 1)
        for top in group
        for row in (top, *kernels.get(top["index"], ()))
    }
    shown = None if len(groups) <= FEW_STEPS else SHOWN_TYPES
    return [_step(number, group, kernels, number_of, shown) for number, group in enumerate(groups, 1)]


def _step(
    number: int, group: Sequence[Json], kernels: Mapping[int, Sequence[Json]], number_of: Mapping[int, int], shown: int | None
) -> Step:
    first = group[0]
    is_delegate = first["kind"] == "DELEGATE"
    inner = kernels.get(first["index"], ()) if is_delegate else group
    members = [*group, *inner] if is_delegate else group
    types: list[tuple[str, int | None]]
    if any(row["op_types"] for row in inner):
        types = list(Counter(name for row in inner for name in dict.fromkeys(map(_type_name, row["op_types"]))).most_common())
    else:
        types = [(_type_name(name), None) for name in first["op_types"]] if is_delegate else []
    shares = [row["share"] for row in group if row["share"] is not None]
    times = [row["mean_ns"] for row in group if row["mean_ns"] is not None]
    reads = {number_of[source] for row in members for source in row["input_rows"] if source in number_of}
    noun = "kernel" if is_delegate else "operator"
    return Step(
        number=number,
        title=answers.backend(first) if is_delegate else "not delegated",
        delegated=bool(first["delegated"]),
        size=units.count(len(inner), noun) if inner else "its kernels are unknown",
        types=types[:shown],
        other_types=len(types[shown:]) if shown else 0,
        share=sum(shares) if shares else None,
        time=units.time(sum(times)) if times else "",
        reads=sorted(source for source in reads if source < number - 1),
        places=[] if is_delegate else _places(group),
    )


def _type_name(name: str) -> str:
    short = answers.short_type(name)
    return "native_batch_norm" if short == "_native_batch_norm_legit_no_training" else short


def _places(rows: Iterable[Json]) -> list[str]:
    lines = list(dict.fromkeys(line for row in rows if (line := views.line_of(row))))
    more = [f"and {units.count(len(lines) - SHOWN_PLACES, 'more line')}"] if len(lines) > SHOWN_PLACES else []
    return [*lines[:SHOWN_PLACES], *more]


def methods(report: Json) -> list[tuple[str, str, float]]:
    """Return the program's methods: name, `36 of 36 nodes in 1 subgraph`, and the delegated part of the nodes."""
    result = []
    for method, delegation in ((report["compile"] or {}).get("delegation") or {}).items():
        inside, outside = delegations.nodes(delegation)
        text = answers.delegated_nodes({**report, "method": method})
        if text:
            result.append((method, text, inside / (inside + outside)))
    return result
