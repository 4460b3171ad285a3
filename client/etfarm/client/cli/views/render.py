"""View of reports: the latency first, then the lines of the user's code, then the rest.

It takes the JSON of etfarm.report/1, so that a report looks the same now and when it is shown again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from etfarm.client.cli.terminal.output import VERDICT_STYLES, columns
from etfarm.client.cli.views import compiled as compiling
from etfarm.client.cli.views import generated, measured, numerics, paired
from etfarm.client.formats import answers, generation, sentences, units
from etfarm.wire import comparison, views

TOP = 10
"""Default number of shown operators."""

FACT_NAME = 13
"""Columns of the names of facts."""

LEAST_CODE = 12
"""Minimum number of characters of a shown line of code; fewer are not useful."""

LEAST_MODULE = 10
"""Minimum number of characters of a shortened module's path; fewer are not useful."""

_USEFUL_MODULE, _LEAST_PLACE = 20, 24
"""Number of characters for which places make room beside them, down to their minimum: rows of a line differ by modules."""

_NO_SOURCES = "no modules and source lines: a .pte has no ETRecord; bench the model or its .pt2 to see them"
"""Caption of the operators of a ready program."""

_UNRESOLVED = "UNRESOLVED"
"""The kind of the row for kernels that are too short to measure."""

Json = Mapping[str, Any]


def reports(
    documents: Iterable[Json], *, width: int, top: int = TOP, job: str = "", jobs: Mapping[str, str] = MappingProxyType({})
) -> RenderableType:
    """Return all reports of a job below each other.

    Args:
        width: columns of the terminal.
        top: number of operators per report; 0 is all.
        job: the id in the command that shows more.
        jobs: the ids of other jobs by the ids of the reports that are from them.
    """
    parts: list[RenderableType] = []
    documents = list(documents)
    compared = paired.comparisons(documents)
    is_explained = False
    for document in documents:
        if parts:
            parts.append(Text())
        against = compared.get(document["cell"])
        own_job = jobs.get(document["id"], job)
        parts.append(report(document, width=width, top=top, job=own_job, against=against, explain_sources=not is_explained))
        is_explained = is_explained or _lacks_sources(document)
    return Group(*parts)


def report(
    document: Json,
    *,
    width: int,
    top: int = TOP,
    job: str = "",
    against: Text | None = None,
    explain_sources: bool = True,
) -> RenderableType:
    """Return one REPORT; the arguments are those of `reports`.

    Args:
        against: how it compares with an alternating program.
        explain_sources: whether to say why the operators of a ready program have no modules and source lines.
    """
    parts: list[RenderableType] = [headline(document, width)]
    undelegated: dict[str, list[int]] = {}
    if against is not None:
        parts.append(_indented(against))
    if unquantized := sentences.unquantized(document):
        parts.append(_indented(Text(f"NOT QUANTIZED  {unquantized}", style="bold yellow")))
    if document["error"]:
        parts.append(_indented(error_text(document["error"])))
    if reasons := list(measured.verdict(document)):
        parts.append(_indented(_grid(reasons)))
    if document["generation"]:
        parts.append(_indented(generated.points(document["generation"])))
        if (of_methods := generated.parts(document["generation"])) is not None:
            parts.append(_indented(of_methods))
        parts += [_indented(part) for part in _prefill(document["generation"], width - 2, top)]
    if document["operators"]:
        rows = _resolved(document["operators"])
        if document["generation"]:
            parts.append(_indented(generated.title("decode", document["generation"]["decode_execution"], document["profile"])))
        parts.append(Padding(operators(rows, width=width - 2, top=top), (0, 0, 0, 2)))
        undelegated = _undelegated(document, _chosen(rows, top))
        for reason, indexes in undelegated.items():
            parts.append(_indented(Text(f"{', '.join(map(str, indexes))} not delegated: {reason}", style="dim")))
        left_out = _left_out(rows, top, job)
        if left_out is not None:
            parts.append(_indented(left_out))
        if explain_sources and _lacks_sources(document):
            parts.append(_indented(Text(_NO_SOURCES, style="dim")))
    if (gap := numerics.gap(document, width=width - 2, top=top, job=job)) is not None:
        parts.append(_indented(gap))
    if facts := list(_facts(document, width - 2, undelegated)):
        parts.append(_indented(_grid(facts)))
    return Group(*parts)


def label(document: Json) -> str:
    """Return a label of the measurement: `resnet8 · xnnpack_fp32 · pi5-a (Cortex-A76, 4 threads)`."""
    return comparison.label({**document, "model": document["model"] and document["model"]["name"]})


def headline(document: Json, width: int) -> RenderableType:
    """Return the result in one line, or in two if the terminal is narrow."""
    left = Text(label(document), style="bold", no_wrap=True, overflow="ellipsis")
    right = Text(no_wrap=True, overflow="ellipsis")
    latency, profile = document["latency"], document["profile"]
    if document["state"] != "SUCCEEDED":
        right.append(document["state"], "bold red" if document["state"] == "FAILED" else "yellow")
    if latency and latency["p50_ns"] is not None:
        p50, interval = answers.median(latency)
        right.append(f"{'  ' if right else ''}p50 {p50}", "bold")
        if interval:
            right.append(f" {interval}")
        _append_verdict(right, document)
        right.append(f"  {units.count(answers.sample_count(document), 'sample')}", "dim")
        if len(document["runs"]) > 1:
            right.append(f"  {sentences.runs(document)}", "dim")
        if profile:
            right.append(f"  {sentences.traced(profile)}", "dim")
    elif rated := generation.headline(document["generation"] or {"points": ()}):
        rate, interval, where = rated
        right.append(f"{'  ' if right else ''}decode {rate}", "bold").append(f" {interval}" if interval else "")
        _append_verdict(right, document)
        right.append(f"  {where}", "dim")
    elif document["state"] == "SUCCEEDED":
        stopped = (document["compile"] or {}).get("stopped_after")
        right.append("ran once" if document["device"] else f"stopped after {stopped}" if stopped else "compiled", "green")
    if left.cell_len + 3 + right.cell_len <= width:
        return left.append(" " * max(3, min(width, 116) - left.cell_len - right.cell_len)).append_text(right)
    return Group(left, _indented(right))


def _append_verdict(text: Text, document: Json) -> None:
    if (verdict := document["verdict"]) and verdict["status"]:
        text.append("  ").append(verdict["status"].replace("_", " "), VERDICT_STYLES.get(verdict["status"], ""))


def operators(rows: Sequence[Json], *, width: int, top: int = TOP) -> RenderableType:
    """Return the operators that took longest, with kernels under their delegate.

    The columns are share, time, name, backend, source, module and code.
    """
    chosen = _chosen(rows, top)
    shares = [units.percent(answers.share(row)) for row in chosen]
    times = _times(chosen)
    names = [f"{'  ' if row['parent'] is not None else ''}{_name(row)}" for row in chosen]
    backends = [_backend(row) for row in chosen]
    places = [_place(row) for row in chosen]
    modules = [str(row["module"] or "") if row["source"] else "" for row in chosen]  # else it is the place
    codes = [((row["source"] or {}).get("code") or "").strip() for row in chosen]
    numbers = ["" if row["kind"] in ("REST", _UNRESOLVED) else str(row["index"]) for row in chosen]

    # Names get the remaining room first, then places, which make room for modules, then code, which is dropped first.
    room = width - sum(2 + max(map(len, column)) for column in (numbers, shares, times, backends))
    place_width = min(max(map(len, places)), max(room * 9 // 20, 12))
    name_width = min(max(map(len, names)), room - place_width - 4)
    left = room - place_width - name_width - 6
    lacking = max(0, min(_USEFUL_MODULE, max(map(len, modules))) - left)
    spare = min(lacking, max(0, place_width - _LEAST_PLACE))
    place_width, left = place_width - spare, left + spare
    module_width = min(max(map(len, modules)), left)
    module_width = module_width if module_width >= LEAST_MODULE or module_width == max(map(len, modules)) else 0
    code_width = left - (module_width + 2 if module_width else 0)
    if not module_width:
        # Rows of one line of a library are told apart by their modules.
        shown = [_line_and_module(row, place_width) or place for row, place in zip(chosen, places, strict=True)]
    else:
        shown = places
    table = columns(("right", "dim"), ("right", ""), ("right", ""), ("left", ""), ("left", "dim"), ("left", "cyan"))
    if module_width:
        table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for place, row in enumerate(chosen):
        style = "dim" if row["kind"] in ("REST", _UNRESOLVED) else "bold" if (row["share"] or 0) >= 0.1 else ""
        table.add_row(
            numbers[place],
            Text(shares[place], style=style),
            times[place],
            Text(units.without_middle(names[place], name_width), style=style),
            backends[place],
            units.without_start(shown[place], place_width),
            *([units.without_start(modules[place], module_width)] if module_width else ()),
            Text(units.without_end(codes[place], code_width) if code_width >= LEAST_CODE else ""),
        )
    return table


def _times(rows: Sequence[Json]) -> list[str]:
    """Return the time of each row in one unit, with its precision: `760.0 µs ±1.2 %`."""
    precisions = [answers.precision(row) for row in rows]
    width = max(map(len, precisions), default=0)
    times = [
        time or (f"<{units.time(row['resolution_ns'])}" if row["resolution_ns"] else "")
        for time, row in zip(units.column([answers.time_ns(row) for row in rows]), rows, strict=True)
    ]
    return [f"{time} {precision:>{width}}" if width else time for time, precision in zip(times, precisions, strict=True)]


def error_text(error: Json) -> Text:
    """Return an ERROR as one sentence with its remedy."""
    text = Text()
    text.append(f"{error['reason']}", "red")
    text.append(f" {error['message']}")
    if error["remedy"]:
        text.append(f" {error['remedy']}")
    return text


def _resolved(rows: Sequence[Json]) -> list[Json]:
    """Return `rows` with a single row for a delegate's kernels if all of them are too short to measure."""
    kept: list[Json] = []
    for row in rows:
        if row["kind"] != "KERNEL":
            kept.append(row)
            continue
        kernels = [kernel for kernel in rows if kernel["kind"] == "KERNEL" and kernel["parent"] == row["parent"]]
        resolution_ns = max((kernel["resolution_ns"] or 0.0 for kernel in kernels), default=0.0)
        if any(kernel["p50_ns"] is not None for kernel in kernels) or len(kernels) < 2 or not resolution_ns:
            kept.append(row)
        elif row is kernels[0]:
            scale, unit = units.unit_of(resolution_ns)
            unknown = dict.fromkeys(("source", "module", "mean_ci95_ns", "mean_ns", "rounding_ns"))
            share = sum(kernel["share"] or 0.0 for kernel in kernels) or None
            most_ns = sum((kernel["mean_ci95_ns"] or (0.0, resolution_ns))[1] for kernel in kernels)
            whole_ns = next((answers.time_ns(parent) for parent in rows if parent["index"] == row["parent"]), None)
            most_ns = min(most_ns, whole_ns or most_ns)  # no longer than their delegate
            name = f"{len(kernels)} kernels below the {resolution_ns / scale:g} {unit} resolution"
            kept.append({**row, **unknown, "kind": _UNRESOLVED, "name": name, "share": share, "resolution_ns": most_ns})
    return kept


def _chosen(rows: Sequence[Json], top: int) -> list[Json]:
    """Return the `top` leaves that took longest and their delegates, the longest first, children right below."""
    leaves = [row for row in rows if row["kind"] != "DELEGATE" or not _children(rows, row)]
    leaves.sort(key=lambda row: -(row["share"] or 0.0))
    kept = {id(row) for row in (leaves[:top] if top else leaves)}
    kept |= {id(row) for row in rows if any(id(child) in kept for child in _children(rows, row))}

    def longest_first(some: Iterable[Json]) -> list[Json]:
        return sorted((row for row in some if id(row) in kept), key=lambda row: -(row["share"] or 0.0))

    chosen = []
    for row in longest_first(row for row in rows if row["parent"] is None):
        chosen.append(row)
        chosen += longest_first(_children(rows, row))
    return chosen


def _children(rows: Sequence[Json], parent: Json) -> list[Json]:
    if parent["kind"] != "DELEGATE":
        return []
    return [row for row in rows if row["parent"] == parent["index"]]


def _left_out(rows: Sequence[Json], top: int, job: str) -> Text | None:
    chosen = {id(row) for row in _chosen(rows, top)}
    more = [row for row in rows if id(row) not in chosen]
    if not more:
        return None
    share = sum(row["share"] or 0.0 for row in more if row["kind"] != "DELEGATE" or not _children(rows, row))
    how = f": etfarm report show {job} --top 0" if job else ""
    return Text(f"and {len(more)} more, {units.percent(share)} together{how}", style="dim")


def _lacks_sources(document: Json) -> bool:
    """Return whether a ready program's operators have neither modules nor source lines."""
    rows = document["operators"] or ()
    return bool(rows) and not document["recipe"] and not any(row["source"] or row["module"] for row in rows)


def _name(row: Json) -> str:
    if row["kind"] != "REST":
        return str(row["name"])
    return "not explained by its kernels" if row["parent"] is not None else "not explained by operators"


def _backend(row: Json) -> str:
    if row["kind"] in ("REST", "KERNEL", _UNRESOLVED):
        return ""  # the same as that of its delegate, right above
    return answers.backend(row)


def _place(row: Json) -> str:
    if line := views.line_of(row):
        return line
    module = str(row["module"] or "")
    return f"module {module}" if module.replace(".", "").isdecimal() else module  # a position in an nn.Sequential


def _line_and_module(row: Json, width: int) -> str:
    """Return a row's line and module for a column that is too narrow for a file: `:92 …layer1.0.conv1`; empty without both."""
    if not (row["source"] and row["module"]):
        return ""
    line = f":{row['source']['line']} "
    return line + units.without_start(str(row["module"]), max(1, width - len(line)))


def _prefill(report: Json, width: int, top: int) -> Iterator[RenderableType]:
    """Yield the operators of encoders and of prefill, each with a title, if they were traced."""
    for encoder in report["encoders"]:
        if encoder["operators"]:
            yield generated.title(encoder["method"], None, encoder["profile"])
            yield operators(_resolved(encoder["operators"]), width=width, top=top)
    if report["prefill_operators"]:
        yield generated.title("prefill", report["prefill_execution"], report["prefill_profile"])
        yield operators(_resolved(report["prefill_operators"]), width=width, top=top)


def _undelegated(document: Json, rows: Sequence[Json]) -> dict[str, list[int]]:
    """Return why rows were not delegated, with the numbers of the rows for each reason."""
    indexes: dict[str, list[int]] = {}
    for row in rows:
        if reason := answers.undelegated_reason(document, row):
            indexes.setdefault(reason, []).append(row["index"])
    return indexes


def _facts(document: Json, width: int, reasons: Collection[str]) -> Iterator[tuple[str, RenderableType]]:
    if inputs := sentences.inputs(document["inputs"]):
        yield "inputs", Text(inputs)
    for output in document["accuracy"] or ():
        yield "accuracy", Text(numerics.accuracy(output))
    if document["generation"]:
        yield from ((name, Text(text)) for name, text in generation.facts(document["generation"]))
    yield from measured.circumstances(document)
    yield from measured.times(document)
    yield from measured.memory(document)
    compiled = document["compile"]
    if compiled:
        # A compilation is the result of a job without devices; a measurement needs only its main facts.
        room = width - FACT_NAME
        alone = document["device"] is None and document["error"] is None
        delegates = document["recipe"] != "portable"
        if alone:
            yield from compiling.whole(compiled, room, delegates=delegates)
        else:
            delegated_time = _delegated_time(document["operators"])
            yield from compiling.brief(compiled, room, delegated_time, delegates=delegates, reasons=reasons)


def _grid(facts: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return a row per fact; equal names in sequence are shown once."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    before = ""
    for name, text in facts:
        grid.add_row(name if name != before else "", text)
        before = name
    return grid


def _delegated_time(rows: Sequence[Json] | None) -> float | None:
    shares = [row["share"] for row in rows or () if row["parent"] is None and row["kind"] == "DELEGATE"]
    return sum(share or 0.0 for share in shares) if shares else None


def _indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 2))
