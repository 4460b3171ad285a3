"""The web page's process is started again, whatever kept it from starting."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from etfarm.server.config import Config
from etfarm.server.operation import web_page
from etfarm.server.operation.web_page import PageNotStarted, WebPage
from etfarm.wire.channel import parse_address
from tests.support.waiting import becomes

READY = 'echo "the page is at http://127.0.0.1:1"\nexec cat > /dev/null\n'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    local = parse_address("127.0.0.1:0")
    (tmp_path / "data").mkdir()
    return Config(local, tmp_path / "data", web=local)


@pytest.fixture
def page(config: Config, monkeypatch: pytest.MonkeyPatch) -> WebPage:
    """A page whose confinement is known, as the process that confines itself is a script of the test."""
    monkeypatch.setattr(web_page, "RESTART_S", 0.01)
    return WebPage(config, "127.0.0.1:1", "key", measures=())


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the page's program."""
    path = tmp_path / "page"
    path.touch(0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


async def test_a_page_that_cannot_be_started_for_now_is_started_later(program: Path, tmp_path: Path, page: WebPage) -> None:
    starts = tmp_path / "starts"
    os.mkfifo(starts)
    reader, has_started = os.open(starts, os.O_RDWR | os.O_NONBLOCK), asyncio.Event()
    program.write_text(f'#!/bin/sh\necho start >> "{starts}"\n{READY}')
    await page.start()
    assert page.url == "http://127.0.0.1:1" and page.pid is not None
    program.rename(tmp_path / "away")
    keeping = asyncio.create_task(page.keep())
    try:
        os.kill(page.pid, 9)
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
        await page.close()
    assert not list((tmp_path / "data" / "work").iterdir()), "the page's folder is deleted, and so is its record"


async def test_a_page_that_is_late_is_started_again_and_does_not_end_its_server(
    program: Path, tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = tmp_path / "late"
    program.write_text(f'#!/bin/sh\n[ -e "{late}" ] || {{ touch "{late}"; cat > /dev/null; exit; }}\n{READY}')
    monkeypatch.setattr(web_page, "RESTART_S", 0.01)
    monkeypatch.setattr(web_page, "START_S", 0.5)
    page = WebPage(config, "127.0.0.1:1", "key", measures=())
    monkeypatch.setattr(web_page, "WebPage", lambda *_: page)
    async with web_page.running(config, "127.0.0.1:1", "key") as url:
        assert url == ""
        monkeypatch.setattr(web_page, "START_S", 30.0)
        await becomes(lambda: page.url)
        assert page.url == "http://127.0.0.1:1"


async def test_a_page_that_does_not_answer_has_not_started(program: Path, page: WebPage) -> None:
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(PageNotStarted):
        await page.start()
    assert page.pid is None
    await page.close()


async def test_a_page_that_hangs_ends_with_a_server_that_stops_meanwhile(
    program: Path, tmp_path: Path, page: WebPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    program.write_text(f'#!/bin/sh\necho $$ > "{pids}"\nexec sleep 600\n')
    monkeypatch.setattr(web_page, "STOP_S", 0.05)
    starting = asyncio.create_task(page.start())
    hanging = psutil.Process(int(await asyncio.to_thread(pids.read_text)))
    await becomes(lambda: page.pid is not None)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not hanging.is_running() or hanging.status() == psutil.STATUS_ZOMBIE
    assert not list((tmp_path / "data" / "work").iterdir()), "the page's folder is deleted, and so is its record"
    await page.close()


async def test_an_address_in_use_is_named(config: Config) -> None:
    first = WebPage(config, "127.0.0.1:1", "key")
    taken = f"127.0.0.1:{first._listener.getsockname()[1]}"
    with pytest.raises(PageNotStarted, match=f"it cannot listen on {taken}: Address already in use"):
        WebPage(Config(config.listen, config.data, web=parse_address(taken)), "127.0.0.1:1", "key")
    await first.close()
