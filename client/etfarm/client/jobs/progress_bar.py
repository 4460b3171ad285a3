"""A progress bar for a job: in a notebook's output, or on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.formats import notebook, phases
from etfarm.client.models import CellChanged, CellState, Event, JobInfo, Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_STEPS: Final = {
    CellState.QUEUED: 0, CellState.COMPILING: 1, CellState.WAITING_FOR_DEVICE: 2, CellState.RUNNING: 3, CellState.ANALYZING: 4
}  # fmt: skip
_STEPS_OF_CELL: Final = 5
"""Number of steps of a cell until its state is final."""


class JobProgress:
    """How far a job is; notebooks show it as a bar."""

    def __init__(self, job: JobInfo) -> None:
        """Start with a job as last read from the server."""
        self._states = {cell.id: cell.state for cell in job.cells}
        self._labels = {cell.id: cell.label for cell in job.cells}
        self.text = job.state.value.lower()
        """What happens now."""

    @property
    def total(self) -> int:
        """Number of steps of all cells."""
        return _STEPS_OF_CELL * len(self._states)

    @property
    def done(self) -> int:
        """Number of completed steps."""
        return sum(_STEPS_OF_CELL if state.is_terminal else _STEPS.get(state, 0) for state in self._states.values())

    def observe(self, event: Event) -> None:
        """Take an event of the job into account."""
        if isinstance(event, CellChanged):
            self._states[event.cell.id] = event.cell.state
            self._labels[event.cell.id] = event.cell.label
            self.text = str(event)
        elif isinstance(event, Progress):
            part = f" {100 * event.done / event.total:.0f} %" if event.done is not None and event.total else ""
            self.text = f"{self._labels.get(event.cell_id, event.cell_id)}: {phases.describe(event.phase)}{part}"

    def __repr__(self) -> str:
        return f"{self.done}/{self.total} {self.text}"

    def _repr_html_(self) -> str:
        return notebook.progress(self.done, self.total, self.text)


class NotebookBar:
    """A bar in the output of a notebook's cell, which needs no widgets."""

    def __init__(self, progress: JobProgress) -> None:
        from IPython.display import display

        self._handle: Any = display(progress, display_id=True)

    def show(self, progress: JobProgress) -> None:
        """Show how far the job is."""
        self._handle.update(progress)


class TerminalBar:
    """A bar on stderr."""

    def __init__(self, bar: RichProgress, progress: JobProgress) -> None:
        self._bar = bar
        self._task: TaskID = bar.add_task("", total=progress.total)
        self.show(progress)

    def show(self, progress: JobProgress) -> None:
        """Show how far the job is."""
        from rich.markup import escape

        from etfarm.wire.escapes import in_a_line

        self._bar.update(self._task, completed=progress.done, description=escape(in_a_line(progress.text)))


class NoBar:
    """No display, for a stderr that is a file or a pipe, where a bar would be useless."""

    def show(self, progress: JobProgress) -> None:
        """Show nothing."""


@contextmanager
def open_bar(progress: JobProgress) -> Iterator[NotebookBar | TerminalBar | NoBar]:
    """Show a bar in a notebook, else on a terminal; nothing if stderr is no terminal."""
    if is_notebook():
        yield NotebookBar(progress)
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True), transient=True) as bar:
            yield TerminalBar(bar, progress)
    else:
        yield NoBar()


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if (ipython := sys.modules.get("IPython")) is None:
        return False
    return getattr(ipython.get_ipython(), "kernel", None) is not None
