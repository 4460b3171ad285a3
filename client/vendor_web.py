#!/usr/bin/env python
"""Downloads the scripts that the farm's page and the HTML report are shipped with, from npm, each with its licence.

.venv/bin/python client/vendor_web.py          # writes them
.venv/bin/python client/vendor_web.py --check  # compares the shipped files with the pinned digests, without a network

Each package has a version and the sha256 of each file; another content is refused. To move to a newer version, change it here,
run this program, review the difference, and pin the digests that it prints.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CLIENT: Final = Path(__file__).resolve().parent / "etfarm" / "client"
WEB: Final = CLIENT / "web" / "static" / "vendor"
REPORT: Final = CLIENT / "formats" / "html" / "vendor"


@dataclass(frozen=True)
class Package:
    """One package of npm."""

    name: str
    version: str
    folder: Path
    files: Mapping[str, tuple[str, str]]
    """Path in the package by the name here, with its sha256."""


PACKAGES: Final = (
    Package(
        "htmx.org", "2.0.8", WEB,
        {
            "htmx.min.js": ("dist/htmx.min.js", "22283ef68cb7545914f0a88a1bdedc7256a703d1d580c1d255217d0a50d31313"),
            "htmx.LICENSE": ("LICENSE", "d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38"),
        },
    ),
    Package(
        "uplot", "1.6.32", REPORT,
        {
            "uPlot.iife.min.js": ("dist/uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
            "uPlot.min.css": ("dist/uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
            "LICENSE": ("LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
        },
    ),
)  # fmt: skip


def find_changed() -> list[str]:
    """Return the shipped files that differ from the pinned digests, with the digest that they have."""
    changed = []
    for package in PACKAGES:
        for name, (_, expected) in package.files.items():
            path = package.folder / name
            actual = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
            if actual != expected:
                changed.append(f"{path.relative_to(CLIENT)} ({package.name} {package.version}): {actual}, pinned {expected}")
    return changed


def download() -> None:
    """Write the files of all packages."""
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["npm", "pack", "--silent", f"{package.name}@{package.version}"], cwd=scratch, check=True)
            (archive,) = Path(scratch).glob("*.tgz")
            package.folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(archive) as packed:
                for name, (path, _) in package.files.items():
                    member = packed.extractfile(f"package/{path}")
                    assert member is not None, f"{package.name} has no {path}"
                    (package.folder / name).write_bytes(member.read())


def main() -> int:
    """Download or check, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="download nothing; exit with 1 if a file differs from its digest")
    if not parser.parse_args().check:
        download()
    changed = find_changed()
    for line in changed:
        print(f"vendor_web: {line}", file=sys.stderr)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
