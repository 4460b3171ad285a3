"""--exit-with-stdin of both daemons where stdin is no pipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(reason="starts both daemons")

DAEMONS = {
    "serve": ("serve", "--listen", "127.0.0.1:0", "--no-bundle"),
    "agent": ("agent", "--server", "127.0.0.1:1"),
}


@pytest.mark.parametrize("daemon", DAEMONS)
@pytest.mark.parametrize("stdin", ["/dev/null", "file"])
def test_a_daemon_with_a_closed_stdin_shuts_down_cleanly(daemon: str, stdin: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a word of this is read\n")
    command = [sys.executable, "-m", "etfarm.wire.command", *DAEMONS[daemon], "--data", str(tmp_path / "data")]
    with (tmp_path / stdin).open("rb") as source:  # an absolute name stays what it is
        done = subprocess.run(
            [*command, "--exit-with-stdin"], stdin=source, capture_output=True, text=True, timeout=120, check=False
        )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
