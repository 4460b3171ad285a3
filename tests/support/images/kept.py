"""What is expensive to make is made once: in a folder of its own, which gets its name when it is whole."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from etfarm.wire import digest
from tests.support.programs import cache_folder

Say = Callable[[str], None]
"""Takes a line for whoever waits."""

SOURCES: Final = Path(__file__).parent
_KEPT_S: Final = 86_400
"""Older makes that nobody has asked for since are deleted."""


def made_once(name: str, made_from: Sequence[str | Path], make: Callable[[Path, Say], None]) -> Path:
    """The folder that `make` fills, made at most once for what it is made from; several processes at once make it one time.

    Args:
        name: of the folder, for people.
        made_from: texts, and files whose bytes count.
        make: gets an empty folder and fills it. If it fails, nothing of it is left.
    """
    key = digest.of_value([digest.of_file(item) if isinstance(item, Path) else item for item in made_from])[:16]
    folder = cache_folder() / "images" / f"{name}-{key}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            os.utime(folder)
            return folder
        began = time.monotonic()

        def say(line: str) -> None:
            print(f"[{time.monotonic() - began:5.1f} s] {name}: {line}", file=sys.stderr, flush=True)

        # Of makers that were killed: this one holds the lock.
        for left in folder.parent.glob(f".{name}-making-*"):
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(prefix=f".{name}-making-", dir=folder.parent) as scratch:
            created = Path(scratch) / "made"
            created.mkdir()
            make(created, say)
            created.rename(folder)
        for other in folder.parent.glob(f"{name}-*"):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
        say(f"made {folder.name}, {size_mb(folder):.0f} MB on disk")
    return folder


def size_mb(path: Path) -> float:
    """What a file, or all files of a folder, takes on the disk, in MB; holes count nothing."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return sum(file.stat().st_blocks * 512 for file in files) / 1e6
