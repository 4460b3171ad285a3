"""Reservations of disk space, so that concurrent uploads and attempts do not rely on the same free bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.server.artifacts.errors import DiskFull

_RECOVERED: Final = 1.25
"""Free space at which work is accepted again, relative to the space below which it is refused: a value near 1 would let every
deleted file switch between the two."""


@dataclass(frozen=True)
class DiskSpace:
    """Space on the store's disk."""

    free_bytes: int
    """Free space."""
    work_bytes: int
    """Free space below which new work is refused."""
    is_full: bool
    """Whether new work is refused."""


class Room:
    """Reservations of free space on one disk.

    Args:
        folder: a folder on the disk.
        reserve_bytes: space to leave free for the journal.
        work_bytes: free space below which new jobs, users' uploads and compilations are refused, so that the results of running
            work still fit; `reserve_bytes` by default.
        free: returns the free space of a folder's disk, in bytes.
    """

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int,
        work_bytes: int | None = None,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._work_bytes = max(reserve_bytes, reserve_bytes if work_bytes is None else work_bytes)
        self._free = free
        self._is_full = False
        self._uploads: dict[Hashable, int] = {}
        self._results: dict[Hashable, int] = {}

    def measure(self) -> DiskSpace:
        """Return the disk's space. New work is refused from `work_bytes` on until a quarter more is free again."""
        free = self._free(self._folder)
        self._is_full = free < self._work_bytes * (_RECOVERED if self._is_full else 1.0)
        return DiskSpace(free, self._work_bytes, self._is_full)

    def require_work(self) -> None:
        """Refuse new work while the disk is full.

        Raises:
            DiskFull: there is not enough free space.
        """
        space = self.measure()
        if space.is_full:
            raise DiskFull(
                f"The server's disk is full: {space.free_bytes} bytes are free, and new work needs "
                f"{int(space.work_bytes * _RECOVERED)}.",
                "Free disk where its --data is; it accepts work again by itself. Running work goes on.",
                free_bytes=space.free_bytes, limit_bytes=space.work_bytes,
            )  # fmt: skip

    def reserve(self, key: Hashable, needed: int, *, is_result: bool = False) -> None:
        """Reserve space for an upload. The upload of a result may use space that attempts have reserved.

        Raises:
            DiskFull: there is not enough free space.
        """
        taken = sum(self._uploads.values()) - self._uploads.get(key, 0)
        if not is_result:
            self.require_work()
            taken += sum(self._results.values())
        self._require(needed, taken)
        self._uploads[key] = needed

    def shrink(self, key: Hashable, left: int) -> None:
        """Reduce an upload's reservation to the bytes that are still to be written."""
        self._uploads[key] = left

    def release(self, key: Hashable) -> None:
        """Release an upload's reservation."""
        self._uploads.pop(key, None)

    def reserve_results(self, key: Hashable, needed: int) -> None:
        """Reserve space for the results of an attempt.

        Raises:
            DiskFull: there is not enough free space.
        """
        others = sum(self._uploads.values()) + sum(self._results.values()) - self._results.get(key, 0)
        self._require(needed, others)
        self._results[key] = needed

    def release_results(self, key: Hashable) -> None:
        """Release an attempt's reservation, if any."""
        self._results.pop(key, None)

    def _require(self, needed: int, taken: int) -> None:
        free = max(0, self._free(self._folder) - taken)
        if needed + self._reserve_bytes > free:
            raise DiskFull(
                f"The upload needs {needed} bytes; the store has {free} bytes free and reserves {self._reserve_bytes} of them.",
                "Free disk on the server; nothing of yours was deleted.", needed_bytes=needed, free_bytes=free,
            )  # fmt: skip
