"""Progress of a data set: a bar on a terminal, an occasional line elsewhere.

It is written to stderr.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Final, Self

from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.terminal.lines import Lines
from etfarm.client.formats import units

LINES_S: Final = 10.0
"""Minimum number of seconds between two lines without a terminal."""


def left(done: int, total: int, per_s: float | None) -> str:
    """Return `120 of 300 samples, 45.1/s, 4.0 s left`."""
    parts = [f"{done:,} of {units.count(total, 'sample')}"]
    if per_s:
        parts += [f"{units.significant(per_s)}/s", f"{units.clock((total - done) / per_s)} left"]
    return ", ".join(parts)


class SampleLines(Lines):
    """A progress display that prints an occasional line."""

    def __init__(self, total: int, write: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        """Print lines through a callback.

        Args:
            write: takes one line without its end.
            now: returns the time in seconds.
        """
        super().__init__(write)
        self._total = total
        self._now = now
        self._last_s = now()

    def line(self, text: str) -> None:
        """Write the line."""
        self._write(text)

    def advance(self, done: int, per_s: float | None) -> None:
        """Write a line if the last one is long ago."""
        if self._now() - self._last_s >= LINES_S and done < self._total:
            self._last_s = self._now()
            self._write(left(done, self._total, per_s))


class Bar:
    """A bar that is redrawn in place, and removed when the command is done."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as RichProgress

        from etfarm.client.cli.terminal.output import PlainConsole

        self._progress = RichProgress(
            SpinnerColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.description}", markup=False),
            console=PlainConsole(file=sys.stderr),
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("Starting.", total=self._total)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def status(self, text: str) -> None:
        """Show the sentence beside the bar until the next one."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def moved(self, done: int, total: int) -> None:
        """Show how much is uploaded; the wait for a device follows."""
        self.status(f"Uploading {units.size(done)} of {units.size(total)}." if done < total else "Waiting for a device.")

    def line(self, text: str) -> None:
        """Print the line above the bar, where it stays."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)

    def advance(self, done: int, per_s: float | None) -> None:
        """Redraw the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=left(done, self._total, per_s))


Progress = SampleLines | Bar


def open_progress(total: int) -> Progress:
    """Return the progress display for `total` samples that fits stderr."""
    if sys.stderr.isatty():
        return Bar(total)
    return SampleLines(total, lambda line: tell(line, to_stderr=True, flush=True))
