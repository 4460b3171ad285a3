"""What systemd itself reads in a unit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def systemd_on(text: str, folder: Path) -> str:
    """Return what systemd reads in a unit, in its own words; fail with its complaints."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    path = folder / "etfarm.service"
    path.write_text(text)
    plain = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, "", "")
    # At this level it prints the settings that it has read.
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(path)], env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug"},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
    )  # fmt: skip
    return verified.stdout


def settings_of(dump: str, name: str) -> list[str]:
    """Return the values of a setting in systemd's format."""
    return re.findall(rf"^\s*{name}: (.*)$", dump, re.MULTILINE)
