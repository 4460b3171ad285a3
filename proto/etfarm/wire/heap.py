"""The heap of a long-running process: glibc keeps more of it than the process uses."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Final

TRIM_S: Final = 60.0
"""Time between two returns of unused memory: one takes about a millisecond."""
_M_MMAP_THRESHOLD: Final = -3
"""The option that sets the size from which on a block has a mapping of its own. Source: mallopt(3) and malloc.h."""
_M_ARENA_MAX: Final = -8
"""The option that limits malloc's arenas."""
_MMAP_BYTES: Final = 128 << 10
"""glibc's initial threshold. Unless it is set, glibc raises it whenever a larger mapped block is freed; later blocks of that size
then come from the heap, and leave holes in it.
"""


def share_one_heap() -> None:
    """Let all threads share one heap without large blocks; glibc would give each of gRPC's threads its own, with unused parts.

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
