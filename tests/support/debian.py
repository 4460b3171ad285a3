"""Packages of any of Debian's releases and architectures, unpacked for tests: fetched by an apt that has its own lists and knows
of nothing installed, from this machine's own mirror. Nothing is installed here."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from etfarm.wire import digest
from tests.support.programs import cache_folder, locked

_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def need_debian() -> None:
    """Skips where packages cannot be fetched and unpacked."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            pytest.skip(f"needs a Debian: there is no {program}")


def unpack_packages(
    names: Sequence[str], into: Path, *, suite: str = "bookworm", arch: str = "arm64", alone: bool = False
) -> None:
    """Unpacks packages and all that they depend on, unconfigured.

    Args:
        names: of packages.
        into: a folder; may have files of other packages already.
        suite: Debian's name of the release.
        alone: without what they depend on.
    """
    with tempfile.TemporaryDirectory(prefix="apt-") as scratch:
        folder = Path(scratch)
        for needed in ("state/lists/partial", "cache/archives/partial"):
            (folder / needed).mkdir(parents=True)
        (folder / "state/status").touch()
        signed = f" signed-by={_KEYRING}" if _KEYRING.exists() else ""
        (folder / "sources.list").write_text(f"deb [arch={arch}{signed}] {_mirror()} {suite} main\n")
        settings: dict[str, object] = {
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "state/status",
            "Dir::Cache": folder / "cache",
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": arch,
            "APT::Architectures::": arch,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Acquire::Retries": "3",
            "Acquire::Languages": "none",
        }
        apt = ["apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
        run(*apt, "update")
        archives = folder / "cache/archives"
        if alone:
            run(*apt, "download", *names, folder=archives)
        else:
            run(*apt, "--download-only", "install", *names)
        into.mkdir(parents=True, exist_ok=True)
        for archive in sorted(archives.glob("*.deb")):
            run("dpkg-deb", "--extract", str(archive), str(into))


def debian_tree(packages: Sequence[str], arch: str, release: str) -> Path:
    """Return a folder with what the packages alone hold, fetched once. It is shared: copy it to change it."""
    tree = cache_folder() / f"debian-{release}-{arch}-{digest.of_value(sorted(packages))[:16]}"
    with locked("debian"):
        if not tree.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                partial = Path(folder) / "tree"
                unpack_packages(packages, partial, suite=release, arch=arch, alone=True)
                partial.rename(tree)
    return tree


def run(*command: str, folder: Path | None = None) -> str:
    """Return what a command prints, which has to succeed.

    Args:
        folder: where it works.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def _mirror() -> str:
    """Where this machine has Debian's packages from. Origins are known of lists that were fetched only."""
    need_debian()
    reported = run("apt-get", "indextargets", "--format", "$(ORIGIN)|$(COMPONENT)|$(RELEASE)|$(REPO_URI)", "Created-By: Packages")
    for origin, component, release, uri in (line.split("|") for line in reported.splitlines()):
        is_debian = origin == "Debian" or uri.rstrip("/").endswith("/debian")
        # Updates and security fixes are releases of their own, and may be elsewhere.
        if is_debian and component == "main" and "-" not in release:
            return uri
    pytest.skip("needs a Debian: apt knows no mirror of it")
