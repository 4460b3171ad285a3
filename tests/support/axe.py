"""axe-core, which finds what people with assistive technology cannot use on a page: downloaded once by npm, and kept.

    python -m tests.support.axe    # downloads it, unless it is there

The file is larger than this repository wants, and its licence (MPL-2.0) is for tests only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page

VERSION: Final = "4.14.1"
SHA256: Final = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
RULES: Final = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa")
SERIOUS: Final = ("serious", "critical")


def script() -> str:
    """Return axe-core's source."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "etfarm-ci"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"axe-core-{VERSION}.min.js"
    with (folder / "axe-core.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _download(path)
    text = path.read_bytes()
    assert hashlib.sha256(text).hexdigest() == SHA256, f"{path} is not the file that was pinned: remove it"
    return text.decode()


def _download(path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", f"axe-core@{VERSION}"], cwd=scratch, check=True, capture_output=True)
        (archive,) = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as packed:
            member = packed.extractfile("package/axe.min.js")
            assert member is not None
            part = path.with_suffix(".part")
            part.write_bytes(member.read())
            part.rename(path)


def find_serious(page: Page) -> list[str]:
    """Return what is seriously wrong with a page, each with its element."""
    page.evaluate(script())
    options = {"runOnly": {"type": "tag", "values": RULES}, "resultTypes": ["violations"]}
    result: dict[str, Any] = page.evaluate("(options) => axe.run(document, options)", options)
    return [
        f"{violation['id']}: {violation['help']}: {node['html'][:200]} {node['failureSummary'][:200]}"
        for violation in result["violations"]
        if violation["impact"] in SERIOUS
        for node in violation["nodes"]
    ]


if __name__ == "__main__":
    script()
