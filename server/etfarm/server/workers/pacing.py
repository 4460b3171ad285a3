"""The pace of long computations on the event loop, so that other calls are served in between."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

SLICE_S: Final = 0.001
"""Time in seconds that a computation may use the event loop before others do."""

_LONGEST_PAUSE_S: Final = 0.05

_SWITCH_S: Final = 0.0005
"""Time in seconds that a computing thread keeps the interpreter's lock while another thread waits for it."""


def shorten_thread_switches() -> None:
    """Shorten the time that the event loop waits for the interpreter's lock while other threads compute.

    A call takes the lock several times. With Python's default of 5 ms for each, two threads that compute delay it by 100 ms.
    """
    sys.setswitchinterval(_SWITCH_S)


class Pace:
    """The pace of one computation: after each slice, others may use the event loop for as long as the slice took.

    A `sleep(0)` between slices is not enough. A call takes about ten turns of the event loop, and would wait for a slice of every
    computation in each of them.
    """

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def pause(self) -> None:
        """Let others run if a slice is over."""
        computed_s = time.perf_counter() - self._since_s
        if computed_s >= SLICE_S:
            await asyncio.sleep(min(computed_s, _LONGEST_PAUSE_S))
            self._since_s = time.perf_counter()
