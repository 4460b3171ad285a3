"""View of numerics: outputs against their references, and where in the graph the numbers drift.

It takes the JSON of etfarm.report/1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etfarm.client.formats import answers, gaps, sentences, units
from etfarm.client.formats.gaps import Operator
from etfarm.wire import views
from etfarm.wire.sqnr import decibels, level

Json = Mapping[str, Any]

WORST: Final = 5
"""Default number of shown operators, beside the first bad one."""

_QUANTIZATION: Final = ("quantize", "dequantize", "choose_qparams")
_LEAST_CODE: Final = 12
"""Minimum number of characters of a shown line of code; fewer are not useful."""

_LEAST_ROOM: Final = 48
"""Columns that operators and their places need; the ranges of both sides are dropped if they do not fit."""


def accuracy(output: Json) -> str:
    """Return one output against its reference, in one line."""
    name, nans = output["output"] or "output", output["nan_count"]
    remark = f", {units.count(nans, 'NaN')} where it has {output['reference_nan_count'] or 'none'}" if nans else ""
    samples = sentences.samples(output)
    if output["equal"]:
        return f"{name}: equal to the {output['reference']}{samples and f' {samples}'}{remark}"
    parts = []
    if output["sqnr_db"] is not None:
        parts.append(f"SQNR {decibels(output['sqnr_db'])}")
    if output.get("equal_share") is not None:
        parts.append(f"{units.percent(output['equal_share'])} of the integers equal")
    if samples:
        parts.append(samples)
    if output["max_abs_error"] is not None:
        parts.append(f"max abs error {output['max_abs_error']:.3g}")
    if output["cosine"] is not None:
        parts.append(f"cosine {output['cosine']:.6f}")
    if output["top1_agreement"] is not None:
        parts.append(sentences.top1(output["top1_agreement"]))
    return f"{name}: {', '.join(parts) or 'not comparable'}, against the {output['reference']}{remark}"


def gap(document: Json, *, width: int, top: int, job: str = "") -> RenderableType | None:
    """Return the numeric gap along the graph; None if it was not requested or has no result.

    Args:
        top: 0 shows all operators, anything else the first bad one and the WORST.
        job: the id in the command that shows more.
    """
    numerics, rows = document["numerics"], document["numeric_gap"]
    if not numerics or not rows:
        return None
    operators = list(gaps.operators(rows))
    shown = operators
    if top:
        worst = sorted(operators, key=lambda operator: operator.level_db)[:WORST]
        shown = [operator for operator in operators if operator in worst or operator.judged["first_bad"]]
    parts: list[RenderableType] = [_answer(operators, numerics), _table(shown, width)]
    if len(shown) < len(operators):
        how = f": etfarm report show {job} --top 0" if job else ""
        parts.append(Text(f"and {len(operators) - len(shown)} more with a higher SNR{how}", style="dim"))
    if not numerics["is_timed_program"]:
        note = "The values come from a separate program with one delegate per operator, not from the timed one."
        parts.append(Text(note, style="dim"))
    return Group(*parts)


def _answer(operators: Sequence[Operator], numerics: Json) -> Text:
    text = Text("numerics  ", style="bold")
    against = answers.REFERENCES["QUANTIZED" if any("QUANTIZED" in operator.rows for operator in operators) else "EAGER"]
    threshold = f"{numerics['threshold_db']:g} dB" if numerics["threshold_db"] is not None else "the threshold"
    bad = next((operator for operator in operators if operator.judged["first_bad"]), None)
    if bad is None:
        judged = gaps.judged(operators, numerics)
        if not judged and not numerics.get("wrong_only_when_fused"):
            return text.append(f"none of {len(operators)} values could be judged: the warnings say why", "not bold yellow")
        if fused := gaps.describe_fused(numerics):
            text.append("wrong only when fused", "bold red")
            rest = f": against the {against}, {fused}; none of {judged} operators is bad alone"
            return text.append(rest, "not bold")
        result = f"no bad operator: none of {judged} is further off than rounding explains, against the {against}"
        rest = f"; {judged} of {len(operators)} values judged" if judged < len(operators) else ""
        return text.append(result, "not bold green").append(rest, "not bold")
    row = bad.judged
    level = decibels(row["snr_db"]) if row["snr_db"] is not None else "no SNR"
    module = f" in {row['module']}" if row["module"] else ""
    text.append(f"first bad operator: {_name(row)}{module}", "bold red").append(f", {level} against the {against}", "not bold")
    text.append(f", {threshold} more than rounding explains", "not bold")
    for line in row["sources"] or ([row["source"]] if row["source"] else []):
        code = f"  {line['code'].strip()}" if line["code"] else ""
        text.append(f"\n  {line['file']}:{line['line']}", "not bold cyan").append(code, "not bold")
    return text


def _table(operators: Sequence[Operator], width: int) -> Table:
    quantized = any("QUANTIZED" in operator.rows for operator in operators)
    columns = [("", [str(operator.place) for operator in operators])]
    if quantized:
        columns.append(("vs quantized", [_snr(operator.rows.get("QUANTIZED")) for operator in operators]))
    columns.append(("vs eager", [_snr(operator.rows.get("EAGER")) for operator in operators]))
    columns.append(("max error", [_number(operator.judged["max_abs_error"]) for operator in operators]))
    columns.append(("host", [_range(operator.judged["expected"]) for operator in operators]))
    columns.append(("device", [_range(operator.judged["actual"]) for operator in operators]))
    taken = sum(2 + max(len(text) for text in (head, *texts)) for head, texts in columns)
    if width - taken < _LEAST_ROOM:
        columns = columns[:-2]
        taken = sum(2 + max(len(text) for text in (head, *texts)) for head, texts in columns)
    names = [_name(operator.judged) for operator in operators]
    places = [_place(operator.judged) for operator in operators]
    codes = [((operator.judged["source"] or {}).get("code") or "").strip() for operator in operators]
    # Names get the remaining room first, then places, then code, which is dropped first.
    room = max(24, width - taken)
    name_width = min(max(map(len, names)), room * 11 // 20)
    place_width = min(max(map(len, places)), room - name_width - 2)
    code_width = room - name_width - place_width - 4
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    table.add_column("source", style="cyan", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    for at, operator in enumerate(operators):
        style = "bold red" if operator.judged["first_bad"] else ""
        table.add_row(
            *(Text(texts[at], style=style or ("dim" if not head else "")) for head, texts in columns),
            Text(units.without_end(names[at], name_width), style=style),
            units.without_start(places[at], place_width),
            Text(units.without_end(codes[at], code_width) if code_width >= _LEAST_CODE else ""),
        )
    return table


def _snr(row: Json | None) -> str:
    if row is None:
        return ""
    if row["snr_db"] is None:
        return "-"
    return level(row["snr_db"])


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.2g}"


def _range(values: Json | None) -> str:
    """Return `-0.57 … 0.69`, with the number of NaN or infinite values."""
    if not values:
        return ""
    odd = [f"{values[key]} {name}" for key, name in (("nan_count", "NaN"), ("infinite_count", "inf")) if values[key]]
    parts = [] if values["min"] is None or values["max"] is None else [f"{values['min']:.3g} … {values['max']:.3g}"]
    return ", ".join([*parts, *odd])


def _name(row: Json) -> str:
    """Return `convolution + relu`: the operators without those that only quantize, if there are others."""
    names = [op.rpartition(".")[0].rpartition(".")[2] or op for op in row["ops"]]
    own = [name for name in names if not name.startswith(_QUANTIZATION)] or names
    return " + ".join(own) if len(own) <= 3 else f"{own[0]} + {own[1]} + {len(own) - 2} more"


def _place(row: Json) -> str:
    return views.line_of(row) or str(row["module"] or "")
