"""The board: Debian with Python, the agent's dependencies, and on a second disk the agent of this checkout."""

from __future__ import annotations

import compileall
import os
import py_compile
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Final

from tests.support.images.disks import make_disk
from tests.support.images.kept import SOURCES, Say, made_once
from tests.support.images.kernel import kernel
from tests.support.images.packages import Packages, need_packages, unpack

REPOSITORY: Final = SOURCES.parents[2]
_PYTHON: Final = "3.11"
"""Of Debian bookworm."""
_INIT: Final = SOURCES / "guest" / "board.sh"
# From new to old: pip takes a wheel of any of these tags.
_PLATFORMS: Final = ("manylinux_2_28", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
_NOT_NEEDED: Final = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "var/lib/dpkg")


@dataclass(frozen=True)
class BoardImage:
    """What a board is started from."""

    kernel: Path
    initramfs: Path
    root: Path
    """Read only: Debian, Python, what the agent depends on."""
    agent: Path
    """Read only: etfarm."""

    def __iter__(self) -> Iterator[Path]:
        return iter(astuple(self))


def board_image() -> BoardImage:
    """The board's files. What comes from Debian and from the package registry is made once for a version of these scripts, the
    agent's disk once for a version of etfarm."""
    boot = kernel()
    (agent,) = agent_image()
    sources = (*(SOURCES / name for name in ("board.py", "disks.py", "packages.py")), _INIT, "\n".join(_dependencies()))
    root = made_once("board", sources, _make_root) / "root.ext4"
    return BoardImage(boot.image, boot.initramfs, root, agent)


def agent_image() -> tuple[Path]:
    """The disk with etfarm as it is in this checkout, as `pip install` puts it."""
    need_packages()
    parts = ("proto", "server", "client", "device_agents")
    files = sorted(
        path for part in parts for path in (REPOSITORY / part).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    sources = (Path(__file__), REPOSITORY / "pyproject.toml", *(str(path.relative_to(REPOSITORY)) for path in files), *files)
    return (made_once("agent", sources, _make_agent) / "agent.ext4",)


def _dependencies() -> list[str]:
    """What the extra `agent` needs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["agent"]]


def _make_root(folder: Path, say: Say) -> None:
    scratch = folder.parent
    packages = Packages("bookworm", scratch / "packages", say)
    # grpcio's wheel takes the C++ library from the system.
    names = packages.with_dependencies("python3", "libstdc++6", "base-files", "busybox-static")
    files = packages.fetch(names)
    say("unpacking them")
    root = scratch / "root"
    unpack(files, root)
    for name in _NOT_NEEDED:
        shutil.rmtree(root / name, ignore_errors=True)
    say(f"fetching wheels: {', '.join(_dependencies())}")
    _install(_dependencies(), root / "opt/agent")
    say("compiling Python's files")
    _compile(root / "usr/lib/python3.11", "/usr/lib/python3.11")
    _compile(root / "opt/agent", "/opt/agent")
    _furnish(root)
    say("making the disk")
    make_disk(folder / "root.ext4", 512, root, journal=False)


def _make_agent(folder: Path, say: Say) -> None:
    scratch = folder.parent
    say("building etfarm's wheel")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", scratch / "wheel", REPOSITORY]
    subprocess.run(wheel, check=True, stdout=sys.stderr)
    content = scratch / "content"
    _install([str(next(scratch.glob("wheel/*.whl")))], content)
    _compile(content, "/farm")
    make_disk(folder / "agent.ext4", 64, content, journal=False)


def _install(what: list[str], folder: Path) -> None:
    platforms = [f"--platform={name}_aarch64" for name in _PLATFORMS]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", folder, *platforms, "--python-version", _PYTHON,
         "--implementation", "cp", "--only-binary=:all:", "--no-compile", *([] if len(what) > 1 else ["--no-deps"]), *what],
        check=True, stdout=sys.stderr,
    )  # fmt: skip


def _compile(folder: Path, inside: str) -> None:
    """Compiles for the board, whose emulated processor takes ten times as long; only its own version of Python can."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" != _PYTHON:
        return
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        str(folder), quiet=2, workers=os.cpu_count() or 1, invalidation_mode=unchecked, stripdir=str(folder), prependdir=inside
    )


def _furnish(root: Path) -> None:
    """What packages' scripts would have done, and the board's own init."""
    (root / "bin").mkdir(exist_ok=True)
    (root / "sbin").mkdir(exist_ok=True)
    for name in ("proc", "sys", "dev", "run", "tmp", "farm", "var/lib/etfarm"):
        (root / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(_INIT, root / "sbin/init")
    (root / "sbin/init").chmod(0o755)
    (root / "bin/sh").unlink(missing_ok=True)
    (root / "bin/sh").symlink_to("busybox")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\netfarm:x:990:990::/var/lib/etfarm:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\netfarm:x:990:\n")
    (root / "etc/hostname").write_text("board\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost board\n")
    # As systemd makes it at a machine's first start; it is kept with the agent's data, which is what the board may write.
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/machine-id").symlink_to("/var/lib/etfarm/machine-id")
