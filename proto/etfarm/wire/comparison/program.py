"""The comparison of programs apart from their latency: size, memory, accuracy, delegation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from etfarm.v1 import comparison_pb2
from etfarm.wire import delegation as delegations
from etfarm.wire.comparison.numbers import count, measure
from etfarm.wire.messages import fill
from etfarm.wire.report import Json


def size(base: Json, candidate: Json) -> comparison_pb2.SizeChange | None:
    """Return the change of the sizes; None if neither side has a program."""
    sides = [_sizes(report["compile"]) for report in (base, candidate)]
    if not any(sides):
        return None
    return comparison_pb2.SizeChange(**{key: count(*(side.get(key) for side in sides)) for key in {**sides[0], **sides[1]}})


def memory(base: Json, candidate: Json) -> comparison_pb2.MemoryChange | None:
    """Return the change of the memory; None if neither side's is known."""
    sides = [report["memory"] or {} for report in (base, candidate)]
    peak = count(*(side.get("peak_rss_bytes") for side in sides))
    planned = count(*(sum(side["planned_bytes"]) if side.get("planned_bytes") else None for side in sides))
    return comparison_pb2.MemoryChange(peak_rss_bytes=peak, planned_bytes=planned) if peak or planned else None


def accuracy(base: Json, candidate: Json) -> Iterator[comparison_pb2.AccuracyChange]:
    """Yield the change of each output, matched by name, else by order if both sides have equally many left.

    An output of a report before etfarm 0.3 may have the name of its node in the graph, such as `relu_19`. Both sides are
    compared with the first common reference: the program before quantization, or the quantized one if a side lacks the former.
    Without a common reference, each side has the errors against its own first reference, and there is no change. There is none
    either if the numbers are of other samples: single ones may differ by several dB.
    """
    against = _references(base["accuracy"] or (), candidate["accuracy"] or ())
    sides = [
        {output["output"] or str(place): output for place, output in enumerate(_of(report["accuracy"] or (), reference))}
        for report, reference in zip((base, candidate), against, strict=True)
    ]
    left, right = ([name for name in side if name not in other] for side, other in (sides, sides[::-1]))
    is_common = against[0] == against[1]
    moved = dict(zip(left, right, strict=True)) if len(left) == len(right) else {}
    for output in [*sides[0], *(name for name in right if name not in moved.values())]:
        pair = sides[0].get(output), sides[1].get(moved.get(output, output))
        is_comparable = is_common and not has_other_samples(*pair)
        known = measure(*(side["sqnr_db"] if side else None for side in pair)) if is_comparable else None
        errors = [_errors(side) if side else None for side in pair]
        change_db = known.change if known and known.HasField("change") else None
        yield comparison_pb2.AccuracyChange(
            output=moved.get(output, output), base=errors[0], candidate=errors[1], change_db=change_db
        )


def has_other_samples(base: Mapping[str, Any] | None, candidate: Mapping[str, Any] | None) -> bool:
    """Return whether two outputs of reports, or two OutputErrors, are of different samples.

    Of the timed inputs alone they count as comparable, whatever these are.
    """
    if base is None or candidate is None:
        return False
    old, new = ((side.get("samples") or 1, side.get("samples_digest")) for side in (base, candidate))
    return old != new


def _references(base: Sequence[Mapping[str, Any]], candidate: Sequence[Mapping[str, Any]]) -> tuple[str | None, str | None]:
    """Return the reference of each side's outputs; None for a side without outputs."""
    known = [list(dict.fromkeys(output["reference"] for output in side)) for side in (base, candidate)]
    for reference in known[0]:
        if reference in known[1]:
            return reference, reference
    return known[0][0] if known[0] else None, known[1][0] if known[1] else None


def _of(outputs: Sequence[Mapping[str, Any]], reference: str | None) -> list[Mapping[str, Any]]:
    return [output for output in outputs if output["reference"] == reference]


def delegation(base: Json, candidate: Json) -> dict[str, comparison_pb2.DelegationChange]:
    """Return the change of the delegation by method; empty if neither side reports its delegation."""
    sides = [(report["compile"] or {}).get("delegation") or {} for report in (base, candidate)]
    return {method: _method(*(side.get(method) for side in sides)) for method in {**sides[0], **sides[1]}}


def _sizes(compiled: Mapping[str, Any] | None) -> dict[str, int | None]:
    if not (compiled and compiled["program"]):
        return {}
    parts = compiled["sizes"] or {}
    pte = compiled["program"]["size_bytes"]
    data = sum(file["size_bytes"] for file in (compiled["data"] or {}).values())
    known = {key: parts.get(key) for key in ("program_bytes", "constant_bytes", "delegate_bytes")}
    return {"total_bytes": pte + data, "pte_bytes": pte, **known, "data_bytes": data}


def _errors(output: Mapping[str, Any]) -> comparison_pb2.OutputErrors:
    # Reports of before 0.3.0 are of the timed inputs alone.
    return fill(comparison_pb2.OutputErrors(), {**output, "samples": output["samples"] or 1})


def _method(base: Mapping[str, Any] | None, candidate: Mapping[str, Any] | None) -> comparison_pb2.DelegationChange:
    sides = [side or {} for side in (base, candidate)]
    nodes = [delegations.nodes(side) if side else (None, None) for side in sides]
    operators = [_operators(side.get("operators") or ()) for side in sides]
    # The delegation of a ready program is unknown, which does not mean that it has no operators.
    names = dict.fromkeys([*operators[0], *operators[1]]) if all(sides) else {}
    changed = [name for name in names if operators[0].get(name) != operators[1].get(name)]
    return comparison_pb2.DelegationChange(
        subgraphs=count(*(side.get("subgraphs") for side in sides)),
        delegated_nodes=count(*(inside for inside, _ in nodes)),
        non_delegated_nodes=count(*(outside for _, outside in nodes)),
        operators=[
            comparison_pb2.OperatorDelegationChange(op=name, base=operators[0].get(name), candidate=operators[1].get(name))
            for name in changed
        ],
    )


def _operators(rows: Iterable[Mapping[str, Any]]) -> dict[str, comparison_pb2.DelegatedNodes]:
    return {row["op"]: fill(comparison_pb2.DelegatedNodes(), row) for row in rows}
