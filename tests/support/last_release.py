"""etfarm 0.2.0, the last release, from this repository's history: its agent, client and server.

The tree of its commit is extracted beside the other things that tests keep in the user's cache.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.support import source_tree
from tests.support.farm import WAIT_FOR_NOTHING, Daemon
from tests.support.programs import cache_folder
from tests.support.runner import know_own_runners

VERSION: Final = "0.2.0"
_ROOT: Final = Path(__file__).parents[2]


def commit() -> str:
    """Return the commit of the release, as the contract's folder of releases records it."""
    lines = (_ROOT / "proto" / "releases" / "commits.txt").read_text().splitlines()
    return dict(line.split() for line in lines)[VERSION]


def is_available() -> bool:
    """Whether this checkout has the commit; a shallow clone has not."""
    command = ["git", "cat-file", "-e", f"{commit()}^{{commit}}"]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, check=False).returncode == 0


def tree() -> Path:
    """Return the files of the release, extracted on first use."""
    folder = cache_folder() / f"etfarm-{VERSION}-{commit()[:12]}"
    with (cache_folder() / "last-release.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            archive = subprocess.run(
                ["git", "archive", commit(), *source_tree.PACKAGES, "pyproject.toml"], cwd=_ROOT, capture_output=True, check=True
            )
            part = Path(tempfile.mkdtemp(dir=cache_folder()))
            subprocess.run(["tar", "-x", "-C", part], input=archive.stdout, check=True)
            source_tree.make_runnable(part)
            part.rename(folder)
    return folder


def environment() -> dict[str, str]:
    """Return the variables with which this Python runs the release."""
    return source_tree.environment(tree())


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one command of the release to its end."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ETFARM_")}
    return subprocess.run(
        [sys.executable, "-m", "etfarm.wire.command", *arguments],
        cwd=cwd, env={**clean, **environment(), "COLUMNS": "140"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def agent(folder: Path, address: str) -> Daemon:
    """Return an agent of the release, not yet started."""
    know_own_runners(folder / "agent")
    arguments = ["agent", "--server", address, "--data", str(folder / "agent"), "--name", "board", "--exit-with-stdin"]
    return Daemon([*arguments, *WAIT_FOR_NOTHING], folder / "agent.log", environment())


def server(folder: Path, *options: str) -> Daemon:
    """Return a server of the release, not yet started."""
    arguments = ["serve", "--listen", "127.0.0.1:0", "--data", str(folder / "server"), "--exit-with-stdin", "--no-bundle"]
    return Daemon([*arguments, "--no-prewarm", *options], folder / "serve.log", environment(), knows_health=False)
