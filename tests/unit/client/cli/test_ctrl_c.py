"""Ctrl-C while a command runs: its event loop, its `--json` and its threads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.outcome import Outcome
from etfarm.client.errors import Interrupted
from etfarm.client.transport.daemon_thread import in_thread


def interrupt_soon() -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_cancels_and_lets_the_command_clean_up() -> None:
    cleaned = []

    async def main() -> None:
        interrupt_soon()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            cleaned.append(True)
            raise

    with pytest.raises(Interrupted) as caught:
        run_async(main)
    assert cleaned == [True]
    assert caught.value.signal_number == signal.SIGINT


def test_json_is_there_from_the_first_ctrl_c_on(tmp_path: Path) -> None:
    outcome = Outcome(str(tmp_path / "x.json"))
    result = []

    async def main() -> None:
        interrupt_soon()
        try:
            await asyncio.sleep(30)
        finally:
            result.append(json.loads((tmp_path / "x.json").read_text())["error"]["reason"])

    with pytest.raises(Interrupted):
        run_async(main, outcome)
    assert result == ["CANCELLED"]


def test_work_in_a_thread_does_not_hold_up_ctrl_c() -> None:
    release = threading.Event()

    async def main() -> None:
        interrupt_soon()
        await in_thread(lambda: release.wait(30))

    with pytest.raises(Interrupted):
        run_async(main)
    release.set()


def test_work_in_a_thread_raises_where_it_is_awaited() -> None:
    def work() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        run_async(lambda: in_thread(work))
