"""Debian's arm64 packages on a machine of any architecture: apt with a state of its own, so that nothing is installed here.

The mirror is the one that this machine's apt has.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.support.images.kept import Say

ARCH = "arm64"


def need_packages() -> None:
    """Skips where there is no apt, or no tool that makes an image."""
    for program, package in (("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("mke2fs", "e2fsprogs")):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install {package}")


class Packages:
    """The arm64 packages of one of Debian's releases.

    Args:
        suite: the release's name.
        folder: for apt's lists and packages; made.
        say: hears what happens.
    """

    def __init__(self, suite: str, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say
        for part in ("state/lists/partial", "cache/archives/partial", "debs"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        self._sources = folder / "sources.list"
        uri, keys = _mirror()
        self._sources.write_text(f"deb [{keys}] {uri} {suite} main\n")
        say(f"reading what {suite} has for {ARCH}")
        self._apt("apt-get", "-q", "update")

    def with_dependencies(self, *names: str) -> list[str]:
        """The packages, and all that they depend on, without what they recommend."""
        shown = self._apt("apt-get", "install", "-qq", "--yes", "--no-install-recommends", "--simulate", *names)
        return [line.split()[1] for line in shown.splitlines() if line.startswith("Inst ")]

    def depended_on_by(self, name: str) -> list[str]:
        """The names that a package depends on, itself left out."""
        shown = self._apt("apt-cache", "depends", "--important", name)
        return [line.split()[-1] for line in shown.splitlines() if "Depends:" in line]

    def fetch(self, names: Sequence[str]) -> list[Path]:
        """The packages' files."""
        self._say(f"fetching {len(names)} packages")
        self._apt("apt-get", "download", "-q", *names, cwd=self._folder / "debs")
        return sorted(self._folder.glob("debs/*.deb"))

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        folder = self._folder
        options = {
            "APT::Architecture": ARCH, "APT::Architectures": ARCH, "APT::Sandbox::User": "", "Acquire::Languages": "none",
            "Acquire::Retries": "3", "Dir::Etc::sourcelist": self._sources, "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State": folder / "state", "Dir::State::status": folder / "status", "Dir::Cache": folder / "cache",
        }  # fmt: skip
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        done = subprocess.run([program, *words, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout


def unpack(packages: Iterable[Path], root: Path) -> None:
    """Puts the packages' files below `root`; their scripts are not run."""
    for package in packages:
        subprocess.run(["dpkg-deb", "--extract", package, root], check=True)


def _mirror() -> tuple[str, str]:
    """This machine's mirror of Debian's main archive, and the option that names its keys."""
    wanted = "$(CREATED_BY)\t$(COMPONENT)\t$(LABEL)\t$(REPO_URI)"
    shown = subprocess.run(["apt-get", "indextargets", "--format", wanted], capture_output=True, text=True, check=True).stdout
    for line in shown.splitlines():
        *kind, uri = line.split("\t")
        if kind == ["Packages", "main", "Debian"]:
            return uri, "signed-by=/usr/share/keyrings/debian-archive-keyring.gpg"
    raise RuntimeError("apt knows no Debian archive: add one to its sources and run apt-get update")
