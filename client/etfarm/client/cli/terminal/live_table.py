"""Live tables on stdout: redrawn in place on a terminal, one line for each change elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from etfarm.client.cli.terminal.capabilities import tell

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REDRAWS_PER_S = 4


class ChangeLines:
    """A display that prints a line for each change."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def changed(self, line: str) -> None:
        """Print the line."""
        tell(line, flush=True)


class LiveTable:
    """A table that is redrawn in place, and stays when the command ends."""

    def __init__(self, build: Callable[[Console], RenderableType]) -> None:
        self._build = build
        self._live: Live | None = None

    def __enter__(self) -> Self:
        from rich.live import Live

        from etfarm.client.cli.terminal.output import open_console

        console = open_console()
        self._live = Live(
            console=console,
            get_renderable=lambda: self._build(console),
            refresh_per_second=REDRAWS_PER_S,
            redirect_stdout=False,
            redirect_stderr=True,
        )
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, line: str) -> None:
        """Leave the change to the next redraw."""


ChangeDisplay = ChangeLines | LiveTable


def open_live_table(build: Callable[[Console], RenderableType]) -> ChangeDisplay:
    """Return the display that fits stdout.

    Args:
        build: returns the current table for a console.
    """
    return LiveTable(build) if sys.stdout.isatty() else ChangeLines()
