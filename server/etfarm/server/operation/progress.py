"""The progress of a command that works on a farm's data, on stderr."""

from __future__ import annotations

import sys
import time
from threading import Event, Thread
from typing import Final, Self

_REDRAW_S: Final = 0.1
"""Minimum time between two drawings on a terminal."""
_REPEAT_S: Final = 10.0
_ERASE: Final = "\r\x1b[K"


class Progress:
    """A line that is redrawn in place on a terminal, and a new line every ten seconds elsewhere, such as in a log.

    Use it in a with statement, which ends it.

    Args:
        repeat_s: interval of the lines where there is no terminal.
    """

    def __init__(self, repeat_s: float = _REPEAT_S) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._repeat_s = repeat_s
        self._drawn_s = 0.0
        self._line = ""
        self._ended = Event()
        self._repeating = Thread(target=self._repeat, name="progress", daemon=True)

    def show(self, what: str, done: int, total: int) -> None:
        """Show how much is done out of all, unless the last drawing was just now."""
        self._line = f"{done:,} of {total:,} {what}"
        now_s = time.monotonic()
        if self._is_terminal and (done == total or now_s - self._drawn_s >= _REDRAW_S):
            self._drawn_s = now_s
            print(f"{_ERASE}{self._line}", end="", file=sys.stderr, flush=True)

    def _repeat(self) -> None:
        """Print the newest line, also if it is the same: then one artifact takes long."""
        while not self._ended.wait(self._repeat_s):
            print(self._line or "working", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if not self._is_terminal:
            self._repeating.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            print(_ERASE, end="", file=sys.stderr, flush=True)
        else:
            self._ended.set()
            self._repeating.join()


def size_text(size_bytes: int) -> str:
    """Return a size for people."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes} B"
