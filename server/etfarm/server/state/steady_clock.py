"""A clock that no change of the system's time moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Counts while the machine sleeps, too, where the system has such a clock."""


def elapsed_s() -> float:
    """Return the seconds since some moment in the past, whatever happens to the system's time."""
    return time.clock_gettime(_CLOCK)


class SteadyClock:
    """Seconds since the epoch, by the system's time when the clock was created and the time elapsed since.

    Within a process, what happened an hour ago stays an hour ago when somebody sets the system's time.
    """

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = elapsed_s) -> None:
        self._elapsed = elapsed
        self._offset_s = wall() - elapsed()

    def __call__(self) -> float:
        """Return the time."""
        return self._elapsed() + self._offset_s
