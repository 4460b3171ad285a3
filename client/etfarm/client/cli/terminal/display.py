"""Display of a waiting command: a live table on a terminal, plain lines elsewhere.

It is written to stderr.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self

from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.terminal.lines import Lines
from etfarm.client.formats import phases, units
from etfarm.client.models import Cell, CellChanged, CellState, Event, Progress
from etfarm.client.transport.presence import BACK

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live

ROWS = 16
"""Maximum number of cells in the live table; the most active come first."""


class PlainDisplay(Lines):
    """A display that prints a line when something ends."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """Print lines through a callback.

        Args:
            write: takes one line without its end.
        """
        super().__init__(write)
        self._labels: dict[str, str] = {}
        self._states: dict[str, str] = {}
        self._waits: dict[str, dict[str, set[str]]] = {}
        """Reasons that were written, without their numbers, by phase and by cell."""

    def cells(self, cells: Sequence[Cell]) -> None:
        """Set the names of the cells."""
        self._labels = {cell.id: cell.label for cell in cells}

    def event(self, event: Event) -> None:
        """Write a line for a phase that ended, a new state, or a new reason to wait."""
        if isinstance(event, Progress) and event.duration_ms is not None:
            took = units.milliseconds(event.duration_ms)
            self._waits.pop(event.cell_id, None)
            p50 = f"p50 {units.time(event.p50_ns)}" if event.p50_ns else ""
            text = "".join(f", {part}" for part in (event.message, p50) if part)
            self._write(f"{self._label(event)}: {phases.describe(event.phase)}: {took}{_by(event.actor)}{text}")
        elif isinstance(event, Progress) and phases.is_wait(event.phase):
            # The reading in a reason changes all the time, and what is busy in a pool: neither is a new reason for long.
            waits, reason = self._waits.setdefault(event.cell_id, {}), re.sub(r"[\d.]+", "", event.message)
            reasons = waits.setdefault(event.phase, set())
            if reason not in reasons and len(reasons) < _REASONS:
                reasons.add(reason)
                text = f", {event.message}" if event.message else ""
                self._write(f"{self._label(event)}: {phases.describe(event.phase)}{_by(event.actor)}{text}")
        elif isinstance(event, CellChanged):
            text = str(event)
            if self._states.get(event.cell.id) != text:
                self._states[event.cell.id] = text
                self._write(text)

    def log(self, line: str, cell: str) -> None:
        """Write the line."""
        self._write(f"{cell}: {line}" if cell else line)

    def _label(self, event: Progress) -> str:
        return self._labels.get(event.cell_id, event.cell_id)


class LiveDisplay:
    """A table of the cells that is redrawn in place, and removed when the command is done."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._status = "Starting."
        self._cells: dict[str, Cell] = {}
        self._progress: dict[str, Progress] = {}
        self._since: dict[str, float] = {}
        self._p50: dict[str, str] = {}
        """Medians of cells whose timed pass has ended, although their reports may follow later."""
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        from rich.live import Live

        from etfarm.client.cli.terminal.output import PlainConsole

        self._live = Live(
            # Keep this file object: an export replaces sys.stderr for a while, and a table half drawn elsewhere would leave its
            # rest here.
            console=PlainConsole(file=sys.stderr),
            get_renderable=lambda: self,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=True,  # output of a user's factory goes above the table
        )
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the table and print why cells failed, since stdout may be a file."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        for line in self._failures():
            tell(line, to_stderr=True, flush=True)

    def status(self, text: str) -> None:
        """Show the sentence until the next one."""
        self._status = text

    def moved(self, done: int, total: int) -> None:
        """Show how much is uploaded."""
        self._status = f"Uploading {units.size(done)} of {units.size(total)}."

    def cells(self, cells: Sequence[Cell]) -> None:
        """Show a row for each cell."""
        self._status = ""
        for cell in cells:
            self._cells[cell.id] = cell
            self._since.setdefault(cell.id, time.monotonic())

    def event(self, event: Event) -> None:
        """Show a cell's newest state and phase."""
        if self._status == BACK:
            self._status = ""
        if isinstance(event, CellChanged):
            known = self._cells.get(event.cell.id)
            if known is None or known.state is not event.cell.state:
                self._since[event.cell.id] = time.monotonic()
                # Progress may arrive before the change that it follows.
                if (progress := self._progress.get(event.cell.id)) is not None and progress.at <= event.at:
                    del self._progress[event.cell.id]
            self._cells[event.cell.id] = event.cell
        elif isinstance(event, Progress):
            self._progress[event.cell_id] = event
            if event.p50_ns is not None:
                self._p50[event.cell_id] = f"p50 {units.time(event.p50_ns)}"

    def log(self, line: str, cell: str) -> None:
        """Print the line above the table, where it stays."""
        if self._live is not None:
            self._live.console.print(f"{cell}: {line}" if cell else line, style="dim", markup=False, highlight=False)

    def _p50_of(self, cell: Cell) -> str:
        return self._p50.get(cell.id, "") if cell.state in (CellState.RUNNING, CellState.ANALYZING) else ""

    def _failures(self) -> list[str]:
        failed = [cell for cell in self._cells.values() if cell.error is not None and cell.state is CellState.FAILED]
        return [f"etfarm: {f'{cell.label}: ' if len(self._cells) > 1 else ''}{cell.error}" for cell in failed]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        elapsed = units.clock(time.monotonic() - self._started)
        if not self._cells:
            yield Spinner("dots", Text(f"{self._status}  {elapsed}", no_wrap=True, overflow="ellipsis"))
            return
        heading, labels = _distinguish(list(self._cells.values()))
        if heading:
            yield Text(heading, style="bold", no_wrap=True, overflow="ellipsis")
        liveliest = sorted(self._cells.values(), key=lambda cell: (cell.state.is_terminal, _rank(cell), cell.index))
        now = time.monotonic()
        rows = [
            (
                labels[cell.id],
                Text(_state(cell), style=_STYLES.get(cell.state.value, "bold")),
                ", ".join(filter(None, (self._p50_of(cell), _doing(cell, self._progress.get(cell.id))))),
                "" if cell.state.is_terminal else units.clock(now - self._since[cell.id]),
            )
            for cell in sorted(liveliest[:ROWS], key=lambda cell: cell.index)
        ]
        label, state, doing, spent = (max(len(row[place]) for row in rows) for place in range(4))
        # States and times are never shortened: the activity shrinks first, down to a third, and then the name.
        room = max(2, options.max_width - state - spent - 6)
        doing = min(doing, max(room // 3, room - label))
        label = max(1, min(label, room - doing))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, overflow="ellipsis", width=label)
        table.add_column(no_wrap=True, width=state)
        table.add_column(no_wrap=True, overflow="ellipsis", style="dim", width=doing)
        table.add_column(no_wrap=True, justify="right", style="dim", width=spent)
        for row in rows:
            table.add_row(*row)
        ended = sum(cell.state.is_terminal for cell in self._cells.values())
        more = f", {len(liveliest) - ROWS} more" if len(liveliest) > ROWS else ""
        foot = f"{self._status}  " if self._status else ""
        foot += f"{ended} of {units.count(len(self._cells), 'cell')} done{more}  {elapsed}"
        yield table
        yield Spinner("dots", Text(foot, style="dim", no_wrap=True, overflow="ellipsis"))


_REASONS: Final = 5
"""Maximum number of reasons of one wait that are written as lines."""
_LIMIT: Final = re.compile(r"(at most [^:,]+)(?:: |, )?")
"""The time limit of a wait in a message."""

_STYLES = {"SUCCEEDED": "green", "FAILED": "bold red", "CANCELLED": "yellow", "QUEUED": "dim", "WAITING_FOR_DEVICE": "yellow"}


def _distinguish(cells: Sequence[Cell]) -> tuple[str, dict[str, str]]:
    """Return the traits that all cells share, for a heading, and by id the rest.

    A single cell has no heading.
    """
    if len(cells) == 1:
        return "", {cells[0].id: cells[0].label}
    shared = [len(set(values)) == 1 for values in zip(*(cell.traits for cell in cells), strict=True)]
    heading = " · ".join(trait for trait, same in zip(cells[0].traits, shared, strict=True) if trait and same)
    labels = {}
    for cell in cells:
        own = [trait for trait, same in zip(cell.traits, shared, strict=True) if trait and not same]
        labels[cell.id] = " · ".join(own) or f"cell {cell.index}"  # the same on several devices
    return heading, labels


def _rank(cell: Cell) -> int:
    return {"RUNNING": 0, "ANALYZING": 1, "COMPILING": 2}.get(cell.state.value, 3)


def _doing(cell: Cell, progress: Progress | None) -> str:
    if cell.state.is_terminal:
        return cell.error.message if cell.error is not None else cell.latency
    if progress is None:
        return cell.waiting_for
    words = phases.describe(progress.phase).removeprefix(_state(cell)).strip()
    far = f" {100 * progress.done / progress.total:.0f} %" if progress.done is not None and progress.total else ""
    detail = progress.message or cell.waiting_for
    if cell.state is CellState.WAITING_FOR_DEVICE and progress.phase in ("", "WAIT_FOR_DEVICE"):
        return detail
    if words.startswith("waiting for ") and (limit := _LIMIT.search(detail)) is not None:
        # A narrow terminal cuts the end: how long it may last comes first.
        words = words.replace("waiting for ", f"waiting {limit[1]} for ", 1)
        detail = detail.replace(limit[0], "", 1)
    return ", ".join(filter(None, (f"{words}{far}{_by(progress.actor)}".strip(), detail)))


def _state(cell: Cell) -> str:
    return phases.describe_state(cell.state.value)


def _by(actor: str) -> str:
    """Return on which device a phase runs; empty for the server."""
    return f" on {actor}" if actor not in ("", "SERVER") else ""


Display = PlainDisplay | LiveDisplay


def open_display() -> Display:
    """Return the display that fits stderr."""
    return LiveDisplay() if sys.stderr.isatty() else PlainDisplay(lambda line: tell(line, to_stderr=True, flush=True))
