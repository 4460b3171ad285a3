"""The console for results, as wide as there is room."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, OverflowMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from etfarm.client.cli.terminal.capabilities import in_a_line, printable

PIPE_WIDTH = 100_000
"""Columns if stdout is not a terminal and COLUMNS is not set: a file or a pipe has whole names, source lines and sentences."""

WIDEST = 200

LEAST_WIDTH = 8
"""Minimum width of a column; below it, the line is cut at its end."""
LEAST_WRAPPED_WIDTH = 20
"""Minimum width of a column that wraps: narrower sentences take too many lines."""

VERDICT_STYLES = {"VALID": "green", "INVALID": "bold red", "NOT_BENCHMARKABLE": "yellow"}
"""Styles of a verdict's status."""


class PlainConsole(Console):
    """A console on which only rich itself controls the terminal.

    It makes every text `printable`, however deeply nested, and parses no markup: `[red]`, `[link=...]` and `:name:`
    are shown
    as they are.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, with visible marks instead of control characters."""
        for segment in super().render(renderable, options):
            if segment.control is None and (clean := printable(segment.text)) != segment.text:
                yield Segment(clean, segment.style)
            else:
                yield segment


def open_console(*, to_stderr: bool = False) -> Console:
    """Return the console for results: stdout, or stderr if `--json -` uses stdout.

    rich respects NO_COLOR.
    """
    file = sys.stderr if to_stderr else sys.stdout
    width = PIPE_WIDTH if _is_pipe(file) else None
    console = PlainConsole(file=file, width=width)
    if console.width > WIDEST and not _is_pipe(file):
        console.width = WIDEST
    return console


def _is_pipe(file: IO[str]) -> bool:
    return not (file.isatty() or os.environ.get("COLUMNS"))


def show(renderable: RenderableType, *, to_stderr: bool = False) -> None:
    """Print one result."""
    say(open_console(to_stderr=to_stderr), renderable)


def say(console: Console, *renderables: RenderableType) -> None:
    """Print renderables below each other, without rich's trailing blanks if the output is not a terminal."""
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    if _is_pipe(console.file):
        console.width = PIPE_WIDTH
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    console.file.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())
    console.file.flush()


def show_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    shrink: Sequence[str] = (),
    wrap: Sequence[str] = (),
    spare: Sequence[str] = (),
    to_stderr: bool = False,
) -> None:
    """Print a plain table: dim heads, no lines, one line per row unless a column wraps.

    Args:
        right: heads of the columns that are aligned right.
        shrink: heads of the columns that are shortened, with an ellipsis, where the terminal is narrow; the widest first.
        wrap: those of `shrink` that continue on further lines instead.
        spare: heads of the columns that are left out, the first ones first, where that does not suffice.
    """
    console = open_console(to_stderr=to_stderr)
    say(console, build_table(console, heads, rows, right=right, shrink=shrink, wrap=wrap, spare=spare))


def build_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    shrink: Sequence[str] = (),
    wrap: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> Table:
    """Return the table that `show_table` prints on a console."""
    rows = [[_in_a_line(cell) for cell in row] for row in rows]
    room = PIPE_WIDTH if _is_pipe(console.file) else console.width
    widths = {head: max([cell_len(head), *(cell_len(str(row[place])) for row in rows)]) for place, head in enumerate(heads)}
    least = {head: LEAST_WRAPPED_WIDTH if head in wrap else LEAST_WIDTH for head in shrink}
    for head in spare:
        if sum(min(width, least.get(each, width)) + 2 for each, width in widths.items()) - 2 <= room:
            break
        widths.pop(head, None)
    kept = [place for place, head in enumerate(heads) if head in widths]
    heads, rows = [heads[place] for place in kept], [[row[place] for place in kept] for row in rows]
    # rich distributes a lack of room over all columns, and cuts ids and states before sentences.
    for _ in range(sum(widths.values()) + 2 * (len(heads) - 1) - room):
        wide = [head for head in shrink if widths.get(head, 0) > least[head]]
        widest = max(wide, key=widths.__getitem__, default=None)
        if widest is None:
            break
        widths[widest] -= 1
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        justify: JustifyMethod = "right" if head in right else "left"
        overflow: OverflowMethod = "fold" if head in wrap else "ellipsis"
        table.add_column(head, justify=justify, no_wrap=head not in wrap, overflow=overflow, width=widths[head])
    for row in rows:
        table.add_row(*row)
    return table


def _in_a_line(cell: str | Text) -> str | Text:
    if isinstance(cell, str):
        return in_a_line(cell)
    clean = cell.copy()
    clean.plain = in_a_line(cell.plain)  # the same length as before: the styles stay in place
    return clean


def line(text: str, *, style: str = "") -> Text:
    """Return one sentence as unchanged text."""
    return Text(text, style=style)


def columns(*formats: tuple[JustifyMethod, str]) -> Table:
    """Return a table without heads and frames, of columns that do not wrap; each has a justification and a style."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify, style in formats:
        table.add_column(justify=justify, style=style, no_wrap=True)
    return table


def facts(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Return names and values below each other; values may take several lines."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid
