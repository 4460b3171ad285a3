"""The end of stdin, whatever stdin is; each in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

WAITS = """
import asyncio
from etfarm.wire.owner import at_end_of_stdin

async def main():
    stop = asyncio.Event()
    at_end_of_stdin(stop.set)
    print("waiting", flush=True)
    await stop.wait()

asyncio.run(main())
print("ended")
"""
LEAVES = WAITS.replace("await stop.wait()", "return")


def start(code: str, stdin: int | None) -> subprocess.Popen[str]:
    # A stdin that is closed from the start: only the child can do that.
    closing = [] if stdin is not None else ["sh", "-c", 'exec "$@" <&-', "sh"]
    command = [*closing, sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert error == ""
    return out


@pytest.mark.parametrize("kind", ["/dev/null", "file", "closed"])
def test_what_has_an_end_already_ends_at_once(kind: str, tmp_path: Path) -> None:
    if kind == "closed":
        assert ended(start(WAITS, None)) == "waiting\nended\n"
        return
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    with (Path(kind) if kind == "/dev/null" else path).open("rb") as stdin:
        assert ended(start(WAITS, stdin.fileno())) == "waiting\nended\n"


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_is_waited_for(blocking: bool) -> None:
    theirs, ours = os.pipe()
    os.set_blocking(theirs, blocking)
    process = start(WAITS, theirs)
    os.close(theirs)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    os.write(ours, b"something")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    os.close(ours)
    assert ended(process) == "ended\n"


def test_a_terminal_is_waited_for() -> None:
    ours, theirs = pty.openpty()
    process = start(WAITS, theirs)
    os.close(theirs)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    os.close(ours)
    assert ended(process) == "ended\n"


def test_waiting_keeps_no_process_alive() -> None:
    theirs, ours = os.pipe()
    try:
        assert ended(start(LEAVES, theirs)) == "waiting\nended\n"
    finally:
        os.close(ours)
        os.close(theirs)
