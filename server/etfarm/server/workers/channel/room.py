"""The disk space that files of a child need."""

from __future__ import annotations

import os
from pathlib import Path

from etfarm.server.workers.errors import child_disk_full


def require_room(folder: Path, size_bytes: int) -> None:
    """Refuse to write to a disk that has less free space.

    Raises:
        DISK_FULL: the disk has not so much left.
    """
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < size_bytes:
        raise child_disk_full("a compile node's task", f"{folder} has less than {size_bytes >> 20} MiB left")
