"""The board's disks: Debian with Python and what the agent depends on, and the agent of this checkout."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from tests.support.debian import unpack_packages
from tests.support.images.disks import make_disk
from tests.support.images.kept import SOURCES, Say, made_once
from tests.support.images.kernel import Image, image_of
from tests.support.rootfs import board_root, install_agent

_INIT: Final = SOURCES / "guest" / "board.sh"
_NOT_NEEDED: Final = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "var/lib/dpkg")


def board_image() -> Image:
    """The board's files; what is on them comes from Debian and from the package registry."""
    needed = "\n".join(distribution("etfarm").requires or ())
    sources = (Path(__file__), SOURCES / "disks.py", SOURCES.parent / "rootfs.py", _INIT, needed)
    return image_of(made_once("board", sources, _make) / "root.ext4")


def make_agent_disk(path: Path) -> Path:
    """A disk with etfarm as it is in this checkout now, which takes a second. Gives `path`."""
    content = install_agent(path.with_suffix(".content"))
    make_disk(path, 64, content, journal=False)
    shutil.rmtree(content)
    return path


def _make(folder: Path, say: Say) -> None:
    say("fetching Debian's Python and pip's packages, unless they are there")
    board_root()
    say("fetching busybox")
    root = folder.parent / "root"
    shutil.copytree(board_root(), root, symlinks=True, copy_function=os.link)
    unpack_packages(["busybox-static", "base-files"], root, alone=True)
    for name in _NOT_NEEDED:
        shutil.rmtree(root / name, ignore_errors=True)
    _furnish(root)
    say("making the disk")
    make_disk(folder / "root.ext4", 512, root, journal=False)


def _furnish(root: Path) -> None:
    """What the packages' scripts would have done, and the board's own init. Files here have other names elsewhere: none is
    changed in place."""
    for name in ("bin", "sbin", "proc", "sys", "dev", "run", "tmp", "farm", "var/lib/etfarm"):
        (root / name).mkdir(parents=True, exist_ok=True)
    files = {
        "sbin/init": _INIT.read_text(),
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\netfarm:x:990:990::/var/lib/etfarm:/bin/sh\n",
        "etc/group": "root:x:0:\netfarm:x:990:\n",
        "etc/hosts": "127.0.0.1 localhost board\n",
    }
    for name, text in files.items():
        (root / name).unlink(missing_ok=True)
        (root / name).write_text(text)
    (root / "sbin/init").chmod(0o755)
    # A machine's id is made at its first start; it is kept with the agent's data, which is what the board may write.
    links = {"bin/sh": "busybox", "etc/machine-id": "/var/lib/etfarm/machine-id"}
    for name, target in links.items():
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)
