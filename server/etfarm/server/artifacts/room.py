"""Disk room: what is announced counts against the free space once, whoever announces it at the same time."""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from pathlib import Path

from etfarm.server.artifacts.errors import DiskFull


class Room:
    """Reservations of a disk's free space.

    Args:
        folder: on the disk.
        reserve_bytes: that stay free for the journal.
    """

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._uploads: dict[Hashable, int] = {}
        self._results: dict[Hashable, int] = {}

    def reserve(self, key: Hashable, needed: int, *, is_result: bool = False) -> None:
        """Set room aside for an upload. A result's may use what attempts have set aside.

        Raises:
            DiskFull: there is not as much.
        """
        taken = sum(self._uploads.values()) - self._uploads.get(key, 0)
        if not is_result:
            taken += sum(self._results.values())
        self._require(needed, taken)
        self._uploads[key] = needed

    def shrink(self, key: Hashable, left: int) -> None:
        """Count what an upload has written no more: the disk counts it."""
        self._uploads[key] = left

    def release(self, key: Hashable) -> None:
        """Give an upload's room back."""
        self._uploads.pop(key, None)

    def reserve_results(self, key: Hashable, needed: int) -> None:
        """Set room aside for what an attempt will give.

        Raises:
            DiskFull: there is not as much.
        """
        others = sum(self._uploads.values()) + sum(self._results.values()) - self._results.get(key, 0)
        self._require(needed, others)
        self._results[key] = needed

    def release_results(self, key: Hashable) -> None:
        """Give an attempt's room back; harmless where there is none."""
        self._results.pop(key, None)

    def _require(self, needed: int, taken: int) -> None:
        free = max(0, shutil.disk_usage(self._folder).free - taken)
        if needed + self._reserve_bytes > free:
            raise DiskFull(
                f"The upload needs {needed} bytes, the store has {free} free and keeps {self._reserve_bytes} of them.",
                "Free disk on the server; nothing of yours was deleted.", needed_bytes=needed, free_bytes=free,
            )  # fmt: skip
