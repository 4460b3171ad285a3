"""View of generated text: the rates at each prompt length and depth. It takes REPORT.generation of etfarm.report/1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from etfarm.client.cli.terminal.output import VERDICT_STYLES, columns
from etfarm.client.formats import generation, units

Json = Mapping[str, Any]


def points(document: Json) -> RenderableType:
    """Return a row for each prompt length at each depth."""
    table = columns(*(("left" if name in ("token", "verdict") else "right", "") for name in generation.COLUMNS))
    table.add_row(*(Text(name, style="dim") for name in generation.COLUMNS))
    for row in generation.rows(document):
        *cells, verdict = row
        table.add_row(*cells, Text(verdict, style=VERDICT_STYLES.get(verdict.replace(" ", "_"), "red")))
    return table


def parts(document: Json) -> RenderableType | None:
    """Return a row for each method of each point; None unless several methods generate together."""
    rows = generation.parts(document)
    if not rows:
        return None
    table = columns(*(("left" if name == "method" else "right", "") for name in generation.PART_COLUMNS))
    table.add_row(*(Text(name, style="dim") for name in generation.PART_COLUMNS))
    for row in rows:
        table.add_row(*row)
    return table


def title(name: str, execution: Json | None, profile: Json | None) -> Text:
    """Return the heading of the operators of prefill or decode."""
    what = f"{name}: {units.count(execution['tokens'], 'token')} at position {execution['position']:,}" if execution else name
    took = f", traced {units.time(profile['p50_ns'])}" if profile and profile["p50_ns"] is not None else ""
    return Text(f"{what}{took}", style="dim")
