"""Limits on a child's use of its host."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOADING_S: Final = 30.0
"""CPU time in seconds that loading any model may take."""
LOADING_S_PER_GIB: Final = 20.0
"""Further CPU time in seconds for each GiB of the model's file."""


@dataclass(frozen=True)
class Limits:
    """Limits of each child, enforced by the kernel (see `jail`)."""

    memory_bytes: int = 8 << 30
    """Private memory on top of the forkserver's when the child was forked. Allocations beyond it fail. The processes that the
    child starts share the limit; if they exceed it, the whole tree is killed."""

    cpu_s: int = 3600
    """CPU time of all threads in seconds; a child that exceeds it is killed."""

    file_bytes: int = 32 << 30
    """Maximum size of a file that the child may write."""

    threads: int = 2
    """Number of torch's intra-op threads in the child. The forkserver uses one: a fork of a process with torch threads hangs."""

    processes: int = 512
    """Maximum number of processes and threads of the whole tree at a time."""

    reserve_bytes: int = 128 << 20
    """Free space to keep on the disk of the child's folder. A child is killed if less is free, so that the farm can write."""


@contextmanager
def limit_loading(model: Path) -> Iterator[None]:
    """Limit the CPU time of loading a model in a child. SIGPROF ends a child that exceeds it, also within native code.

    CPU time instead of a deadline: a busy host delays a valid model, but takes no more CPU time for it.
    """
    signal.setitimer(signal.ITIMER_PROF, LOADING_S + LOADING_S_PER_GIB * model.stat().st_size / (1 << 30))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
