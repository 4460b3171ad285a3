"""View of a compilation: its size and files, its delegation, and what needs attention.

It takes `compile` of a REPORT, so that it looks the same now and when it is shown again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from etfarm.client.cli.terminal.output import columns
from etfarm.client.formats import sentences, units
from etfarm.wire import delegation as delegations
from etfarm.wire import views
from etfarm.wire.sqnr import decibels

TOP = 5
"""Maximum number of listed operators outside of delegates, and of those that stayed in fp32."""

TOP_BRIEF = 3
"""The same maximum beside a measurement."""

LEAST_CODE = 12
"""Minimum number of characters of a shown line of code; fewer are not useful."""

Json = Mapping[str, Any]
Fact = tuple[str, RenderableType]


def whole(compiled: Json, width: int, *, delegates: bool = True) -> Iterator[Fact]:
    """Yield all facts of a compilation that was the user's goal.

    Args:
        width: columns for a fact's value.
        delegates: whether the recipe delegates at all; if so, operators outside of delegates are listed.
    """
    if compiled["stages"]:
        yield "stages", _stages(compiled, width)
    if compiled["stopped_after"]:
        files = compiled["stage_files"] or {}
        parts = [f"{name} {units.size(file['size_bytes'])}" for name, file in files.items()]
        yield "stopped", Text(f"after {compiled['stopped_after']}: {', '.join(parts) or 'no files'}")
    if compiled["program"]:
        yield "size", Text(_size(compiled))
    if planned := _planned(compiled):
        yield "memory", Text(planned)
    if compiled["modules"]:
        yield "modules", _modules(compiled["modules"], width)
    for method, delegation in (compiled["delegation"] or {}).items():
        if share := _share(delegation):
            yield "delegated", Text(_of(method, compiled, share))
    if delegates:
        yield from _undelegated(compiled, width, TOP)
        yield from _reasons(compiled, TOP)
    yield from _stayed(compiled, width, TOP)
    yield from _selected(compiled)
    for check in compiled["checks"] or ():
        yield "host check", _check(check)
    yield from _warnings(compiled)


def brief(
    compiled: Json, width: int, delegated_time: float | None, *, delegates: bool = True, reasons: Collection[str] = ()
) -> Iterator[Fact]:
    """Yield the facts of a compilation that matter beside a measurement.

    Args:
        width, delegates: as in `whole`.
        delegated_time: the delegates' part of the traced time; None without a trace.
        reasons: why operators were not delegated, as far as it is shown already.
    """
    if compiled["stages"]:
        text = Text()
        if compiled["cached"]:
            text.append("cached; took ", "dim")
        text.append(" · ".join(f"{stage['stage']} {units.milliseconds(stage['duration_ms'])}" for stage in compiled["stages"]))
        yield "compile", text
    if compiled["program"]:
        parts = [units.size(compiled["program"]["size_bytes"])]
        for method, delegation in (compiled["delegation"] or {}).items():
            if share := _share(delegation):
                parts.append(_of(method, compiled, share))
        if delegated_time is not None:
            parts.append(f"{units.percent(delegated_time)} of the traced time in delegates")
        yield "program", Text(", ".join(parts))
    if delegates:
        yield from _undelegated(compiled, width, TOP_BRIEF)
        yield from _reasons(compiled, TOP_BRIEF, reasons)
    yield from _stayed(compiled, width, TOP_BRIEF)
    yield from _warnings(compiled)


def _stages(compiled: Json, width: int) -> Table:
    """Return a row per stage: its time, where it ran, and the time of each method if there are several."""
    rows = []
    for stage in compiled["stages"]:
        where = (stage["where"] or "").lower()
        if stage["cached"] or (compiled["cached"] and where == "server"):
            where = f"{where}, cached".removeprefix(", ")
        methods = stage["methods"] or {}
        times = [f"{name} {units.milliseconds(ms)}" for name, ms in methods.items()] if len(methods) > 1 else []
        rows.append((stage["stage"], units.milliseconds(stage["duration_ms"]), where, times))
    room = width - sum(2 + max(len(row[place]) for row in rows) for place in range(3))
    table = columns(("left", ""), ("right", ""), ("left", "dim"))
    table.add_column(style="dim", overflow="fold")
    for stage_name, took, where, times in rows:
        line = " · ".join(times)
        table.add_row(stage_name, took, where, line if len(line) <= room else "\n".join(times))
    return table


def _size(compiled: Json) -> str:
    text = units.size(compiled["program"]["size_bytes"])
    sizes = compiled["sizes"]
    if sizes:
        names = (("program", "program_bytes"), ("constants", "constant_bytes"), ("delegates", "delegate_bytes"))
        text += f": {' · '.join(f'{name} {units.size(sizes[key])}' for name, key in names if sizes[key])}"
        methods = {name: method["delegate_bytes"] for name, method in (sizes["methods"] or {}).items()}
        methods = {name: value for name, value in methods.items() if value}  # constant methods have no entry
        if len(methods) > 1:
            text += f" ({', '.join(f'{name} {units.size(value)}' for name, value in methods.items())})"
    files = [f"{name} {units.size(file['size_bytes'])}" for name, file in (compiled["data"] or {}).items()]
    return f"{text}; data {', '.join(files)}" if files else text


def _modules(modules: Sequence[Json], width: int) -> Table:
    """Return the modules that own most: their part of the program, and the peak of their own tensors."""
    ordered = sorted(modules, key=lambda module: (-module["constant_bytes"], -module["planned_bytes"]))
    several = len({module["method"] for module in modules}) > 1
    table = columns(("right", ""), ("right", "dim"), ("left", ""))
    for module in ordered[:TOP]:
        planned = f"planned {units.size(module['planned_bytes'])}" if module["planned_bytes"] else ""
        name = module["module"] or "the model itself"
        name = f"{module['method']}: {name}" if several else name
        table.add_row(units.size(module["constant_bytes"]), planned, units.without_start(name, max(LEAST_CODE, width - 36)))
    if len(ordered) > TOP:
        rest = units.size(sum(module["constant_bytes"] for module in ordered[TOP:]))
        table.add_row(rest, "", Text(f"in {len(ordered) - TOP} more: etfarm report show JOB --by module", style="dim"))
    return table


def _planned(compiled: Json) -> str:
    methods = ((compiled["sizes"] or {}).get("methods") or {}).items()
    sizes = {
        name: units.size(sum(method_sizes["planned_bytes"])) for name, method_sizes in methods if method_sizes["planned_bytes"]
    }
    if len(sizes) > 1:
        return f"planned {', '.join(f'{name} {size}' for name, size in sizes.items())}"
    return f"planned {next(iter(sizes.values()))}" if sizes else ""


def _share(delegation: Json) -> str:
    delegated, outside = delegations.nodes(delegation)
    nodes = delegated + outside
    if nodes <= 0:
        return ""
    if not delegation["subgraphs"]:
        return "nothing delegated"
    return f"{delegated} of {units.count(nodes, 'node')} delegated in {units.count(delegation['subgraphs'], 'subgraph')}"


def _of(method: str, compiled: Json, text: str) -> str:
    return f"{method}: {text}" if len(compiled["delegation"]) > 1 else text


def _undelegated(compiled: Json, width: int, top: int) -> Iterator[Fact]:
    """Yield operators outside of delegates."""
    rows = []
    for method, delegation in (compiled["delegation"] or {}).items():
        for operator in delegation["operators"] or ():
            if operator["non_delegated"] and operator["op"] not in delegations.GLUE:
                rows.append((operator["op"], operator["non_delegated"], method, operator["places"]))
    if rows:
        yield "undelegated", _operators(rows, len(compiled["delegation"]) > 1, width, top)


def _reasons(compiled: Json, top: int, shown: Collection[str] = ()) -> Iterator[Fact]:
    """Yield why the operators that are most frequent outside of delegates were not delegated."""
    nodes: Counter[tuple[str, str]] = Counter()
    for delegation in (compiled["delegation"] or {}).values():
        for operator in delegation["operators"] or ():
            for place in operator["places"] or ():
                if (reason := place.get("undelegated_reason")) and reason not in shown:
                    nodes[operator["op"], reason] += place["count"]
    for (op, reason), _ in nodes.most_common(top):
        yield "reason", Text(f"{op}: {reason}")


def _selected(compiled: Json) -> Iterator[Fact]:
    """Yield what the names in a recipe file selected."""
    for method, selected in (compiled.get("selected") or {}).items():
        of = f"{method}: " if len(compiled["selected"]) > 1 else ""
        for entry in (selected["names"] or ())[:TOP]:
            yield "selected", Text(f"{of}{sentences.selected(entry)}")


def _stayed(compiled: Json, width: int, top: int) -> Iterator[Fact]:
    stayed = compiled["stayed_fp32"] or {}
    rows = [
        (operator["op"], operator["count"], method, operator["places"])
        for method, ops in stayed.items()
        for operator in ops["operators"] or ()
    ]
    if rows:
        yield "stayed fp32", _operators(rows, len(stayed) > 1, width, top)


def _operators(rows: Iterable[tuple[str, int, str, Sequence[Json] | None]], methods: bool, width: int, top: int) -> Table:
    """Return the most frequent operators, a row each: count, name, and the most frequent line of the user's code."""
    ordered = sorted(rows, key=lambda row: -row[1])
    shown = ordered[:top]
    names = [f"{method}: {op}" if methods else op for op, _, method, _ in shown]
    places = [_place(row[3] or ()) for row in shown]
    codes = [_code(row[3] or ()) for row in shown]
    counts = [f"{row[1]} x" for row in shown]
    room = width - max(map(len, counts)) - 6
    # The line of code gets the room that names and places leave, and is dropped first.
    place_width = min(max(map(len, places)), max(room * 9 // 20, 8))
    name_width = min(max(map(len, names)), max(room - place_width, 12))
    code_width = room - name_width - place_width
    table = columns(("right", ""), ("left", ""), ("left", "cyan"), ("left", "dim"))
    for count, name, place, code in zip(counts, names, places, codes, strict=True):
        table.add_row(
            count,
            units.without_end(name, name_width),
            units.without_start(place, place_width),
            Text(units.without_end(code, code_width) if code_width >= LEAST_CODE else ""),
        )
    if len(ordered) > top:
        nodes, more = sum(row[1] for row in ordered[top:]), len(ordered) - top
        rest = f"{nodes} node{'s' * (nodes > 1)} more" if more == 1 else f"{nodes} nodes of {more} more"
        table.add_row("", Text(f"and {rest}", style="dim"), "", "")
    return table


def _place(places: Sequence[Json]) -> str:
    if not places:
        return ""
    first = places[0]
    text = views.line_of(first) or str(first["module"] or "")
    return f"{text} (+{len(places) - 1})" if text and len(places) > 1 else text


def _code(places: Sequence[Json]) -> str:
    return str(places[0]["source"]["code"] or "").strip() if places and places[0]["source"] else ""


def _check(check: Json) -> Text:
    """Return one run on the server: its inputs, and the worst of its outputs."""
    shapes = f" [{', '.join(check['shapes'])}]" if check["shapes"] else ""
    which = f"{check['method']}, {str(check['inputs']).lower()} inputs{shapes}: "
    outputs = check["outputs"] or ()
    if not check["ran"]:
        return Text(f"{which}did not run: {check['why']}", style="yellow")
    if not outputs:
        return Text(f"{which}ran, not compared: {check['why']}" if check["why"] else f"{which}ran")
    if all(output["equal"] for output in outputs):
        return Text(f"{which}equal to eager PyTorch")
    sqnr = [output["sqnr_db"] for output in outputs if output["sqnr_db"] is not None]
    errors = [output["max_abs_error"] for output in outputs if output["max_abs_error"] is not None]
    shares = [share for output in outputs if (share := output.get("equal_share")) is not None]
    parts = [f"SQNR {decibels(min(sqnr))}"] if sqnr else []
    parts += [f"{units.percent(min(shares))} of the integers equal"] if shares else []
    parts += [f"max abs error {max(errors):.3g}"] if errors else []
    worst = f", the worst of {len(outputs)} outputs" if len(outputs) > 1 else ""
    return Text(f"{which}{', '.join(parts) or 'not comparable'} against eager PyTorch{worst}")


def _warnings(compiled: Json) -> Iterator[Fact]:
    for warning in compiled["warnings"] or ():
        yield "warning", Text(warning["message"], style="yellow")
