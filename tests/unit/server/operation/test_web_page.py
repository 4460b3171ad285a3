"""The web page's process is started again, whatever kept it from starting."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from etfarm.server.operation import web_page


async def test_a_page_that_cannot_be_started_for_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, starts = tmp_path / "page", tmp_path / "starts"
    os.mkfifo(starts)
    reader, has_started = os.open(starts, os.O_RDWR | os.O_NONBLOCK), asyncio.Event()
    program.write_text(f'#!/bin/sh\necho start >> "{starts}"\necho "the page is at http://127.0.0.1:1"\nexec cat > /dev/null\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(web_page, "RESTART_S", 0.01)
    process, url = await web_page._start([])
    assert url == "http://127.0.0.1:1"
    program.rename(tmp_path / "away")
    keeping = asyncio.create_task(web_page._keep([], process))
    try:
        process.kill()
        await process.wait()
        done, _ = await asyncio.wait({keeping}, timeout=0.2)
        assert not done, keeping
        os.read(reader, 100)
        asyncio.get_running_loop().add_reader(reader, has_started.set)
        (tmp_path / "away").rename(program)
        await asyncio.wait_for(has_started.wait(), 20)
    finally:
        asyncio.get_running_loop().remove_reader(reader)
        os.close(reader)
        keeping.cancel()
        await asyncio.wait({keeping})
