"""An aarch64 board's files for tests: Debian's own Python and what pip installs for an agent, fetched once and kept outside of
the checkout; and how a program of them runs here, under qemu's user mode, its children included."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

import pytest

from etfarm.wire import digest
from tests.support.debian import need_debian, run, unpack_packages
from tests.support.emulation import need_emulator
from tests.support.programs import cache_folder, locked

PYTHON: Final = "usr/bin/python3.11"
"""In a board's root."""
PACKAGES: Final = "usr/lib/python3/dist-packages"
"""Where pip's packages are in a board's root, which its Python finds without being told."""
_DEBIAN: Final = ("python3", "libstdc++6")
"""With what they depend on: 44 packages. grpcio's wheel needs the second, which is on every Debian that has apt."""
_CHECKOUT: Final = Path(__file__).parents[2]
_PORTIONS: Final = ("proto", "device_agents")
"""Of the checkout: what an agent is made of."""
_PLATFORMS: Final = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
_OF_AGENT: Final = re.compile(r"extra == ['\"]agent['\"]")
_ELF: Final = rb"\x7fELF\x02\x01\x01\x00" + rb"\x00" * 8 + rb"\x02\x00\xb7\x00"
_ELF_MASK: Final = rb"\xff" * 7 + rb"\x00" + rb"\xff" * 8 + rb"\xfe\xff\xff\xff"
"""Of aarch64 programs. Source: qemu's scripts/qemu-binfmt-conf.sh."""


def board_root() -> Path:
    """Debian's Python for aarch64, with what pip installs for `etfarm[agent]` but etfarm itself; 110 MB, 15 s the first time.

    It is shared: copy it to change it. `install_agent` gives the rest.
    """
    need_debian()
    wanted = [text.partition(";")[0] for text in distribution("etfarm").requires or () if _OF_AGENT.search(text)]
    key = digest.of_value([*_DEBIAN, *sorted(wanted), *_PLATFORMS, sys.version_info[:2]])[:16]
    folder = cache_folder() / f"board-{key}"
    with locked("board"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(prefix=".board-", dir=cache_folder()) as staging:
                created = Path(staging) / "root"
                unpack_packages(_DEBIAN, created)
                _pip_install(wanted, created / PACKAGES)
                compile_all(created / "usr/lib/python3.11", created / PACKAGES)
                created.rename(folder)
    return folder


def install_agent(into: Path) -> Path:
    """The checkout's agent as pip would put it into the folder, which goes on a board's PYTHONPATH. Gives `into`."""
    for portion in _PORTIONS:
        shutil.copytree(
            _CHECKOUT / portion / "etfarm", into / "etfarm", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in distribution("etfarm").files or ():
        # Its version and its commands; editable installations have no more here.
        if file.parts[0].endswith(".dist-info") and file.name in ("METADATA", "entry_points.txt"):
            target = into / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), target)
    compile_all(into)
    return into


def compile_all(*folders: Path) -> None:
    """Compiles to bytecode here, where it takes a second, for boards with the same Python; others compile for themselves."""
    if sys.version_info[:2] == (3, 11):
        command = [sys.executable, "-m", "compileall", "-q", "-j0", "--invalidation-mode", "unchecked-hash"]
        # Some files of Debian's tests are no Python, on purpose.
        subprocess.run([*command, *map(str, folders)], capture_output=True, check=False)


def on_board(root: Path, folder: Path, *command: str, cpu: str = "cortex-a76") -> list[str]:
    """The command line that runs a program of `root` here, as qemu's user mode does it, and so every program that it starts.

    The kernel runs them by a binfmt_misc that nobody but they see: of a user namespace (Linux 6.7 and later). The process that
    starts is the program itself: its pid, its signals.

    Args:
        root: as `board_root` gives it.
        folder: for two small scripts; a short path.
        command: begins with an absolute path.
        cpu: see `etfarm.device_agents.runners.emulator.DEFAULT_CPUS`.
    """
    need_emulator()
    need_namespaces()
    emulator = folder / "emulate"
    emulator.write_text(f'#!/bin/sh\nexec {shutil.which("qemu-aarch64-static")} -L {shlex.quote(str(root))} -cpu {cpu} "$@"\n')
    emulator.chmod(0o755)
    # The kernel wants the rule in one write, its escapes as they are here.
    rule = b":".join((b"", b"board", b"M", b"", _ELF, _ELF_MASK, bytes(emulator), b""))
    (folder / "rule").write_bytes(rule)
    enter = folder / "enter"
    enter.write_text(
        "set -e\nmount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc\n"
        f'cat {shlex.quote(str(folder / "rule"))} > /proc/sys/fs/binfmt_misc/register\nexec "$@"\n'
    )
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", str(enter), *command]


def need_namespaces() -> None:
    """Skips where the kernel gives a user namespace no binfmt_misc of its own."""
    mount = "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc && test -e /proc/sys/fs/binfmt_misc/register"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"needs user namespaces with binfmt_misc, of Linux 6.7: {done.stderr.decode(errors='replace').strip()}")


def guest_rss_bytes(pid: int) -> int:
    """Resident bytes of an emulated program itself, without qemu's, which lie above: translated code, and a heap of its own."""
    total, inside = 0, False
    with suppress(ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if (mapping := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line)) is not None:
                inside = int(mapping.group(1), 16) < 1 << 40
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


def _pip_install(requirements: Sequence[str], into: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", "--target", str(into)]
    command += ["--python-version", "3.11", "--implementation", "cp", "--only-binary=:all:"]
    run(*command, *(f"--platform={name}" for name in _PLATFORMS), *requirements)
