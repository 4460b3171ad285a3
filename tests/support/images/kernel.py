"""Debian's arm64 kernel, and an initramfs that finds the root disk and starts its init."""

from __future__ import annotations

import gzip
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.debian import unpack_packages
from tests.support.images.kept import SOURCES, Say, made_once

# The kernel for virtual machines: the same sources with few drivers, a third of the download. The name has its version in it,
# and only the metapackage knows which is the newest.
_PACKAGE: Final = "?reverse-depends(?exact-name(linux-image-cloud-arm64))"
_MODULES: Final = ("virtio", "virtio_ring", "virtio_mmio", "virtio_blk", "failover", "net_failover", "virtio_net")
"""In the order in which they need each other."""
_INIT: Final = SOURCES / "guest" / "initramfs.sh"


@dataclass(frozen=True)
class Image:
    """What a machine is started from. Nobody writes to any of it."""

    kernel: Path
    initramfs: Path
    root: Path
    """A disk."""


def image_of(root: Path) -> Image:
    """The root disk with the kernel and the initramfs that all machines have."""
    folder = made_once("kernel", (Path(__file__), _INIT), _make)
    return Image(folder / "vmlinuz", folder / "initramfs.gz", root)


def _make(folder: Path, say: Say) -> None:
    say("fetching the kernel")
    unpacked = folder.parent / "unpacked"
    unpack_packages([_PACKAGE, "busybox-static"], unpacked, alone=True)
    say("packing the initramfs")
    shutil.copy(next(unpacked.glob("boot/vmlinuz-*")), folder / "vmlinuz")
    files = {"init": _INIT.read_bytes(), "busybox": (unpacked / "bin/busybox").read_bytes()}
    for place, name in enumerate(_MODULES):
        # Underscores and hyphens mean the same in a module's name.
        result = [path for path in unpacked.rglob("*.ko") if path.stem.replace("-", "_") == name]
        files[f"modules/{place}-{name}.ko"] = result[0].read_bytes()
    archive = _cpio(["dev", "proc", "sys", "root", "modules"], files)
    (folder / "initramfs.gz").write_bytes(gzip.compress(archive, 1, mtime=0))


def _cpio(folders: list[str], files: dict[str, bytes]) -> bytes:
    """An archive in cpio's "newc" format, which the kernel unpacks. Source: Linux' Documentation on early userspace."""
    entries = [(name, 0o040755, b"") for name in folders] + [(name, 0o100755, data) for name, data in files.items()]
    archive = bytearray()
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        path = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + path
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)
