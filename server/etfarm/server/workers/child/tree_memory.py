"""The memory of a tree of processes, which is measured if no control group limits it."""

from __future__ import annotations

import contextlib
from pathlib import Path


class TreeMemory:
    """The total memory of this process's descendants.

    Args:
        limit_bytes: limit above which `is_above` returns True.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.is_exceeded = False
        """Whether `is_above` has ever returned True."""

    def is_above(self) -> bool:
        """Measure the tree; return whether it uses more than its limit."""
        self.is_exceeded = self.is_exceeded or sum(map(_own_bytes, _descendants())) > self._limit_bytes
        return self.is_exceeded


def _descendants() -> list[str]:
    """Return the ids of this process's descendants, in the process namespace that /proc belongs to."""
    pids = Path("/proc/thread-self/children").read_text().split()
    for pid in pids:  # grows during the loop
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += (task / "children").read_text().split()
    return pids


def _own_bytes(pid: str) -> int:
    """Return a process's proportional share of memory in bytes, in which shared pages count once; 0 if it has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith(("Pss_Anon:", "Pss_Shmem:")))
