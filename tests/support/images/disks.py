"""Raw ext4 disks from folders."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest


def make_disk(path: Path, size_mb: int, content: Path | None = None, *, journal: bool = True) -> Path:
    """A sparse ext4 disk of `size_mb` MiB at `path`, with the files of `content`. Gives `path`.

    Args:
        journal: False for a disk that is never written.
    """
    if shutil.which("mke2fs") is None:
        pytest.skip("needs mke2fs: apt-get install e2fsprogs")
    options = [] if content is None else ["-d", str(content)]
    features = [] if journal else ["-O", "^has_journal"]
    # No reserve for root: a disk has the size that it says. Tables are made now, and not by the kernel while a test runs.
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-E", "root_owner=0:0,lazy_itable_init=0,nodiscard", *features]
    subprocess.run([*command, *options, path, f"{size_mb}M"], check=True, capture_output=True)
    return path


def settings_disk(path: Path, values: dict[str, str]) -> Path:
    """A disk that is nothing but shell assignments and zeros. Gives `path`."""
    text = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items()).encode()
    path.write_bytes(text + bytes(-len(text) % 512))
    return path
