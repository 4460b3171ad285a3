"""The comparison of programs apart from their latency: size, memory, accuracy, delegation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etfarm.wire import delegation as delegations
from etfarm.wire.comparison.numbers import number
from etfarm.wire.report import Json


def size(base: Json, candidate: Json) -> Json | None:
    """Return the size part of a PAIR; None if neither side has a program. `total_bytes` is the .pte with its data files."""
    sides = [_sizes(report["compile"]) for report in (base, candidate)]
    if not any(sides):
        return None
    keys = ("total_bytes", "pte_bytes", "program_bytes", "constant_bytes", "delegate_bytes", "data_bytes")
    return {key: number(*(side.get(key) for side in sides)) for key in keys}


def memory(base: Json, candidate: Json) -> Json | None:
    """Return the memory part of a PAIR: the peak of the process, and the total of the memory plan's buffers."""
    sides = [report["memory"] or {} for report in (base, candidate)]
    peak = number(*(side.get("peak_rss_bytes") for side in sides))
    planned = number(*(sum(side["planned_bytes"]) if side.get("planned_bytes") else None for side in sides))
    return {"peak_rss_bytes": peak, "planned_bytes": planned} if peak or planned else None


def accuracy(base: Json, candidate: Json) -> list[Json]:
    """Return the accuracy part of a PAIR: outputs matched by name, else by order if both sides have equally many left.

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
    rows = []
    for output in [*sides[0], *(name for name in right if name not in moved.values())]:
        errors = _errors(sides[0].get(output)), _errors(sides[1].get(moved.get(output, output)))
        is_comparable = is_common and not has_other_samples(*errors)
        known = number(*(side["sqnr_db"] if side else None for side in errors)) if is_comparable else None
        change_db = known["change"] if known else None
        rows.append({"output": moved.get(output, output), "base": errors[0], "candidate": errors[1], "change_db": change_db})
    return rows


def has_other_samples(base: Json | None, candidate: Json | None) -> bool:
    """Return whether two ERRORS are of different samples.

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


def delegation(base: Json, candidate: Json) -> Json | None:
    """Return the delegation part of a PAIR, by method; None if neither side reports delegation."""
    sides = [(report["compile"] or {}).get("delegation") or {} for report in (base, candidate)]
    if not any(sides):
        return None
    return {method: _method(*(side.get(method) for side in sides)) for method in sorted({*sides[0], *sides[1]})}


def _sizes(compiled: Mapping[str, Any] | None) -> dict[str, int | None]:
    if not (compiled and compiled["program"]):
        return {}
    parts = compiled["sizes"] or {}
    pte = compiled["program"]["size_bytes"]
    data = sum(file["size_bytes"] for file in (compiled["data"] or {}).values())
    known = {key: parts.get(key) for key in ("program_bytes", "constant_bytes", "delegate_bytes")}
    return {"total_bytes": pte + data, "pte_bytes": pte, **known, "data_bytes": data}


def _errors(output: Mapping[str, Any] | None) -> Json | None:
    if output is None:
        return None
    keys = ("reference", "equal", "sqnr_db", "max_abs_error", "top1_agreement", "nan_count")
    # Reports of before 0.3.0 are of the timed inputs alone.
    samples = {"samples": output["samples"] or 1, "samples_digest": output["samples_digest"]}
    return {**{key: output[key] for key in keys}, **samples}


def _method(base: Mapping[str, Any] | None, candidate: Mapping[str, Any] | None) -> Json:
    sides = [side or {} for side in (base, candidate)]
    nodes = [delegations.nodes(side) if side else (None, None) for side in sides]
    operators = [_operators(side.get("operators") or ()) for side in sides]
    # The delegation of a ready program is unknown, which does not mean that it has no operators.
    names = dict.fromkeys([*operators[0], *operators[1]]) if all(sides) else {}
    changed = [name for name in names if operators[0].get(name) != operators[1].get(name)]
    return {
        "subgraphs": number(*(side.get("subgraphs") for side in sides)),
        "delegated_nodes": number(*(inside for inside, _ in nodes)),
        "non_delegated_nodes": number(*(outside for _, outside in nodes)),
        "operators": [{"op": name, "base": operators[0].get(name), "candidate": operators[1].get(name)} for name in changed],
    }


def _operators(rows: Iterable[Mapping[str, Any]]) -> dict[str, Json]:
    return {row["op"]: {key: row[key] for key in ("delegated", "non_delegated")} for row in rows}
