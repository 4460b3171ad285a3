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
PARSING_S: Final = 60.0
"""CPU time in seconds that parsing a trace, with the ETRecord and the program that it is joined with, may take."""
PARSING_S_PER_GIB: Final = 120.0
"""Further CPU time in seconds for each GiB of these files; an honest trace takes about 30."""


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
    with _timer(signal.ITIMER_PROF, LOADING_S + LOADING_S_PER_GIB * model.stat().st_size / (1 << 30)):
        yield


@contextmanager
def limit_parsing(*files: Path | None) -> Iterator[None]:
    """Limit the CPU time of parsing files in a child, as `limit_loading` does. SIGVTALRM ends a child that exceeds it.

    Args:
        files: None stands for a file that is not parsed, and adds no time, as does a file that is missing.
    """
    size_bytes = sum(file.stat().st_size for file in files if file is not None and file.exists())
    with _timer(signal.ITIMER_VIRTUAL, PARSING_S + PARSING_S_PER_GIB * size_bytes / (1 << 30)):
        yield


@contextmanager
def _timer(which: int, seconds: float) -> Iterator[None]:
    signal.setitimer(which, seconds)
    try:
        yield
    finally:
        signal.setitimer(which, 0)
