"""Documents of etfarm.report/1 with one value exchanged, and everything that reads such a file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from etfarm.client.cli.views import render
from etfarm.client.formats import compared_markdown, csv, html, markdown, model_explorer, parquet, perfetto, tables
from etfarm.wire import comparison
from etfarm.wire import report as projection
from etfarm.wire.comparison import Gate, Side
from etfarm.wire.errors import EtfarmError

VALUES: tuple[Any, ...] = (None, "x", -5, 0.5, True, [], {}, [None], [{}], "\ud800")
"""What a value is exchanged for."""

GATE = Gate.parse(["3%", "size=1%", "memory=1%", "accuracy=1dB"])

Path = tuple[str | int, ...]


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Where every value of a document is; of lists the first two."""
    if at:
        yield at
    children = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in children:
        yield from paths(inner, (*at, key))


def mutated(document: dict[str, Any], seed: int, number: int) -> Iterator[tuple[str, str]]:
    """So many texts of the document, each with one value exchanged, and what was."""
    chosen = [(path, value) for path in paths(document) for value in VALUES]
    for path, value in random.Random(seed).sample(chosen, min(number, len(chosen))):
        created = copy.deepcopy(document)
        inside: Any = created
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        yield json.dumps(created), f"{'.'.join(map(str, path))} = {value!r}"


def read_everywhere(text: str, good: dict[str, Any]) -> str | None:
    """Give the document of `text` to every format, the command line and a comparison; the sentence where it is refused.

    Raises:
        Exception: whatever a reader raises that is no EtfarmError.
    """
    try:
        result = projection.loads(text)
    except EtfarmError as refused:
        return str(refused)
    for write in (markdown.write, html.write, perfetto.write, model_explorer.write, model_explorer.write_times):
        assert write(result)
    for what in tables.WHAT:
        assert csv.write(result, what)
        assert parquet.write(result, what)
    console = Console(width=100, quiet=True, markup=False)
    console.print(render.reports(result["reports"], width=100, job=""))
    sides = [Side(one["reports"], one["job"], None, None) for one in (good, result)]
    try:
        answer = comparison.document(comparison.compare(*sides), GATE)
    except EtfarmError as refused:
        return str(refused)
    assert compared_markdown.write(answer)
    return None
