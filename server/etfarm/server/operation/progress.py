"""The progress of a command that works on a farm's data: a line on a terminal that is redrawn in place."""

from __future__ import annotations

import sys
import time
from typing import Final, Self

_REDRAW_S: Final = 0.1
"""Minimum time between two drawings."""
_ERASE: Final = "\r\x1b[K"


class Progress:
    """The line, on stderr; nothing where that is no terminal. Use it in a with statement, which removes it."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._drawn_s = 0.0

    def show(self, what: str, done: int, total: int) -> None:
        """Show how much is done out of all, unless the last drawing was just now."""
        now_s = time.monotonic()
        if self._is_shown and (done == total or now_s - self._drawn_s >= _REDRAW_S):
            self._drawn_s = now_s
            print(f"{_ERASE}{done:,} of {total:,} {what}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)


def size_text(size_bytes: int) -> str:
    """Return a size for people."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.1f} {unit}"
    return f"{size_bytes} B"
