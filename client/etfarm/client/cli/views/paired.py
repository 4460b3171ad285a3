"""View of programs that alternated on one device, in one line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text

from etfarm.client.cli.terminal.output import VERDICT_STYLES
from etfarm.client.formats import sentences, units
from etfarm.wire.comparison.numbers import ratio_text

Json = Mapping[str, Any]


def comparisons(documents: Iterable[Json]) -> dict[str, Text]:
    """Return by cell how its program compares with the first one of its attempt.

    Example: `B / A  0.912x [0.905, 0.919]  9 % faster  24 rounds, 8 process pairs  (VALID)`.
    """
    by_cell = {document["cell"]: document for document in documents}
    texts: dict[str, Text] = {}
    for cell, document in by_cell.items():
        paired = document["interleaved"]
        if paired is None or paired["ratio"] is None:
            continue
        base = by_cell.get(paired["base_cell"])
        name, base_name = _names(document, base, list(by_cell))
        text = Text(f"{name} / {base_name}  ", style="bold")
        ends = paired["ratio_ci95"]
        text.append(ratio_text(paired["ratio"], ends))
        meaning, style = _meaning(paired["ratio"], ends)
        text.append("  ").append(meaning, style)
        rounds, pairs = units.count(paired["rounds"], "round"), units.count(paired["process_pairs"], "process pair")
        text.append(f"  {rounds}, {pairs}", "not bold dim")
        verdicts = (each["verdict"] for each in (document, base) if each is not None and each["verdict"])
        if (status := sentences.worst_status(verdict["status"] for verdict in verdicts if verdict["status"])) is not None:
            text.append("  (", "not bold").append(status.replace("_", " "), VERDICT_STYLES.get(status, "")).append(
                ")", "not bold"
            )
        texts[cell] = text
    return texts


def _meaning(ratio: float, ends: Sequence[float] | None) -> tuple[str, str]:
    """Return the meaning of a ratio, and its style."""
    meaning = sentences.ratio(ratio, ends)
    if not ends:
        return meaning, "not bold yellow"
    if ends[0] <= 1 <= ends[1]:
        return meaning, "not bold"
    return meaning, "green" if ratio < 1 else "red"


def _names(document: Json, base: Json | None, cells: Sequence[str]) -> tuple[str, str]:
    """Return what distinguishes the two: their models, else their recipes, else their positions in the job."""
    if base is None:
        return _model(document), "the first candidate"
    if _model(document) != _model(base):
        return _model(document), _model(base)
    if document["recipe"] != base["recipe"]:
        return document["recipe"] or _model(document), base["recipe"] or _model(base)
    first, second = (f"{_model(each)} #{cells.index(each['cell'])}" for each in (document, base))
    return first, second


def _model(document: Json) -> str:
    return str(document["model"]["name"]) if document["model"] else "?"
