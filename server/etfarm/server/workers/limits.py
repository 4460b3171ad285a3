"""What one child may use of its host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of each child, enforced by the kernel (see `jail`)."""

    memory_bytes: int = 8 << 30
    """Private memory on top of what the forkserver had when the child was forked. Allocations beyond it fail. The processes that
    the child starts share it: above it, the whole tree is ended."""

    cpu_s: int = 3600
    """CPU time over all threads; a child that spins without ever ending is killed after it."""

    file_bytes: int = 32 << 30
    """Largest file that it may write."""

    threads: int = 2
    """torch's intra-op threads in the child. The forkserver itself stays at one: a fork of a threaded torch hangs."""

    processes: int = 512
    """Processes and threads of the whole tree at a time."""

    reserve_bytes: int = 128 << 20
    """Free space to keep on the disk of the child's folder. A child is ended when less is free, so the farm can still write."""
