"""Raw ext4 disks from folders."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_disk(path: Path, size_mb: int, content: Path | None = None, *, journal: bool = True) -> Path:
    """A sparse ext4 disk of `size_mb` MiB at `path`, with the files of `content`.

    Args:
        journal: False for a disk that is never written.
    """
    options = [] if content is None else ["-d", str(content)]
    features = [] if journal else ["-O", "^has_journal"]
    # No reserve for root: a small disk should be of the size that it says. Tables are made now, not by the kernel later.
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-E", "root_owner=0:0,lazy_itable_init=0,nodiscard", *features]
    subprocess.run([*command, *options, path, f"{size_mb}M"], check=True, capture_output=True)
    return path
