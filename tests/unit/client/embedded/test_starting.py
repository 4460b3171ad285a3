"""The wait for a process of an embedded farm on a busy machine."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from etfarm.client.embedded import supervisor


async def start(folder: Path, code: str) -> tuple[str, list[str]]:
    """Start a process that becomes ready by its code; return what followed `ready:` and what it reported meanwhile.

    A process that waits for a line gets it with the first report.
    """
    statuses: list[str] = []
    log = folder / "serve.log"
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr
        )
    child = supervisor._Child("server", log, process)

    def report(status: str) -> None:
        statuses.append(status)
        assert process.stdin is not None
        process.stdin.write(b"\n")

    try:
        if "stderr" in code:
            async with asyncio.timeout(120):
                while not log.stat().st_size:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)
        return await child.read_line_after("ready:", report), statuses
    finally:
        process.kill()
        await child.stop()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STATUS_S", 0.01)


async def test_a_process_that_starts_slowly_is_waited_for(tmp_path: Path) -> None:
    text, statuses = await start(tmp_path, "import time; input(); print('ready: here', flush=True); time.sleep(60)")
    assert text == "here"
    assert re.match(r"Waiting for the embedded farm's server to start \(\d+ s, load ", statuses[0])


async def test_a_process_that_is_never_ready_and_silent_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 0.05)
    with pytest.raises(
        supervisor._Failed, match=r"did not start within \d+ s and wrote no log; the machine may be too busy \(load"
    ):
        await start(tmp_path, "import time; time.sleep(60)")


async def test_the_log_of_a_process_that_is_never_ready_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 0.05)
    with pytest.raises(supervisor._Failed, match=r"serve.log ends in: converting the database"):
        await start(tmp_path, "import sys, time; print('converting the database', file=sys.stderr, flush=True); time.sleep(60)")
