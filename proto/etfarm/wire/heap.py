"""The heap of a long-running process: glibc keeps more of it than the process uses."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

TRIM_S: Final = 60.0
"""Time between two returns of unused memory: one takes about a millisecond."""
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
"""Options of malloc: the size from which on memory has a mapping of its own, and the number of arenas. Source: mallopt(3)."""
_MMAP_BYTES: Final = 128 << 10
"""glibc's first threshold. Unless it is set, it grows with each large block that is freed, and such blocks leave holes."""


def share_one_heap() -> None:
    """Let all threads share one heap without large blocks: glibc would give each of gRPC's its own, of which parts stay unused.

    Call it before threads start.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


def give_memory_back() -> None:
    """Return the heap's unused memory to the kernel: after transfers and calls, glibc would keep megabytes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def keep_trimmed(every_s: float = TRIM_S) -> None:
    """Return unused memory again and again: between calls of different sizes, megabytes of the heap stay unused for hours."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(give_memory_back)
