"""Limits on a child's use of its host."""

from __future__ import annotations

from dataclasses import dataclass


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
