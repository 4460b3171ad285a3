"""Step 10, command line: the console that results are printed on, as wide as there is room for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from etfarm.client.cli.terminal.capabilities import in_a_line, printable

PIPE_WIDTH = 160
"""Columns where stdout is no terminal and COLUMNS does not say: room for the source lines."""

UNBOUNDED = 100_000
"""Columns for sentences where stdout is no terminal: whoever reads a file or a pipe searches for them whole."""

WIDEST = 200

LEAST_WIDTH = 8
"""Columns are not shortened below this; the line is cut at its end then."""


class PlainConsole(Console):
    """A console on which only rich itself controls the terminal.

    It makes every text `printable`, however deeply nested, and reads none as markup: `[red]`, `[link=...]` and `:name:` are shown
    as they are.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does, with marks in place of what steers."""
        for segment in super().render(renderable, options):
            if segment.control is None and (clean := printable(segment.text)) != segment.text:
                yield Segment(clean, segment.style)
            else:
                yield segment


def open_console(*, to_stderr: bool = False) -> Console:
    """The console for results: stdout, or stderr where stdout is taken by `--json -`. NO_COLOR is respected by rich."""
    file = sys.stderr if to_stderr else sys.stdout
    width = PIPE_WIDTH if _is_pipe(file) else None
    console = PlainConsole(file=file, width=width)
    if console.width > WIDEST:
        console.width = WIDEST
    return console


def _is_pipe(file: IO[str]) -> bool:
    return not (file.isatty() or os.environ.get("COLUMNS"))


def show(renderable: RenderableType, *, to_stderr: bool = False) -> None:
    """Prints one result."""
    say(open_console(to_stderr=to_stderr), renderable)


def say(console: Console, *renderables: RenderableType) -> None:
    """Prints below each other; without the blanks that rich fills lines with where that is not a terminal."""
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    if _is_pipe(console.file):
        console.width = UNBOUNDED
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
    to_stderr: bool = False,
) -> None:
    """Prints a plain table: dim heads, no lines, one row a line.

    Args:
        right: heads of the columns that are aligned right.
        shrink: heads of the columns that are shortened, with an ellipsis, where the terminal is narrow; the widest first.
    """
    console = open_console(to_stderr=to_stderr)
    rows = [[_in_a_line(cell) for cell in row] for row in rows]
    room = UNBOUNDED if _is_pipe(console.file) else console.width
    widths = {head: max([cell_len(head), *(cell_len(str(row[place])) for row in rows)]) for place, head in enumerate(heads)}
    # Rich shares a lack of room among all columns, and cuts ids and states before it cuts sentences.
    for _ in range(sum(widths.values()) + 2 * (len(heads) - 1) - room):
        widest = max(shrink, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= LEAST_WIDTH:
            break
        widths[widest] -= 1
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        justify: JustifyMethod = "right" if head in right else "left"
        made.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", width=widths[head])
    for row in rows:
        made.add_row(*row)
    say(console, made)


def _in_a_line(cell: str | Text) -> str | Text:
    if isinstance(cell, str):
        return in_a_line(cell)
    clean = cell.copy()
    clean.plain = in_a_line(cell.plain)  # as long as before: the styles stay where they are
    return clean


def line(text: str, *, style: str = "") -> Text:
    """One sentence, as it is."""
    return Text(text, style=style)


def facts(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values below each other; values may take several lines."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, value)
    return grid
