"""The progress of commands: a line in place on a terminal, lines from time to time in a log."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from etfarm.server.operation.progress import Progress

ROOT = Path(__file__).parents[4]
SHOW = """
import sys
from etfarm.server.operation.progress import Progress
with Progress(repeat_s=0.05) as progress:
    progress.show("artifacts copied", 1, 2000)
    sys.stdin.read()
"""


def test_a_log_gets_the_newest_line_again_and_again() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    with process:
        lines = [process.stderr.readline() for _ in range(3)]
        assert lines[1:] == ["1 of 2,000 artifacts copied\n"] * 2
        process.communicate()
    assert process.returncode == 0


def test_a_terminal_gets_one_line_which_is_erased() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", SHOW], stdin=subprocess.DEVNULL, stderr=theirs, cwd=ROOT, check=True)
    os.close(theirs)
    shown = ""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(4096):
                shown += part.decode()
        except OSError as error:  # the end of a terminal that no process has open
            assert error.errno == errno.EIO
    assert done.returncode == 0 and shown == "\r\x1b[K1 of 2,000 artifacts copied\r\x1b[K"


def test_a_short_command_says_nothing_in_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.show("rows copied", 1, 2)
    assert capfd.readouterr().err == ""
