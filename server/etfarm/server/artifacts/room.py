"""Reservations of disk space, so that concurrent uploads and attempts do not rely on the same free bytes."""

from __future__ import annotations

import shutil
from collections.abc import Hashable
from pathlib import Path

from etfarm.server.artifacts.errors import DiskFull


class Room:
    """Reservations of free space on one disk.

    Args:
        folder: a folder on the disk.
        reserve_bytes: space to leave free for the journal.
    """

    def __init__(self, folder: Path, reserve_bytes: int) -> None:
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._uploads: dict[Hashable, int] = {}
        self._results: dict[Hashable, int] = {}

    def reserve(self, key: Hashable, needed: int, *, is_result: bool = False) -> None:
        """Reserve space for an upload. The upload of a result may use space that attempts have reserved.

        Raises:
            DiskFull: there is not enough free space.
        """
        taken = sum(self._uploads.values()) - self._uploads.get(key, 0)
        if not is_result:
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
        free = max(0, shutil.disk_usage(self._folder).free - taken)
        if needed + self._reserve_bytes > free:
            raise DiskFull(
                f"The upload needs {needed} bytes; the store has {free} bytes free and reserves {self._reserve_bytes} of them.",
                "Free disk on the server; nothing of yours was deleted.", needed_bytes=needed, free_bytes=free,
            )  # fmt: skip
