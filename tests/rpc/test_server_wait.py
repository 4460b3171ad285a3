"""What clients do while the server is away: they wait, say so, go on when it is back, and give up in time."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from etfarm.client import AsyncFarm, AsyncJob
from etfarm.client.models import JobState
from etfarm.client.transport.presence import AWAY, BACK
from etfarm.wire.errors import EtfarmError
from tests.support.farm import PROMPTLY_S, FarmProcess, etfarm
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.simulated_agent import SimulatedAgent

WAIT_S: Final = 60.0
DEVICE: Final = "id=id-of-board"


class Shown(list[str]):
    """What `on_status` was called with."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.append(text)
        self._changed.set()

    async def until(self, text: str) -> None:
        """Wait until it was shown."""
        async with asyncio.timeout(WAIT_S):
            while text not in self:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FarmProcess]:
    """A server without agents."""
    with FarmProcess(tmp_path, bundle=False) as running:
        yield running.start(agents=0)


@asynccontextmanager
async def waiting_job(server: FarmProcess, farm: AsyncFarm) -> AsyncIterator[AsyncJob]:
    """A job whose device is away, and comes back with the agent's next connection."""
    async with SimulatedAgent(server.address, "agent", devices=["board"]) as agent:
        agent.take_away("id-of-board")
        job = await farm.run(program("add").path, devices=DEVICE)
        async for event in job.watch():
            if "waiting for device" in str(event):
                break
        yield job


async def restart(server: FarmProcess) -> None:
    await asyncio.to_thread(server.restart)


async def test_a_watch_goes_on_when_the_server_is_back_and_says_so(server: FarmProcess) -> None:
    shown = Shown()
    async with AsyncFarm(server.address, on_status=shown) as farm, waiting_job(server, farm) as job:
        sequences: list[int | None] = []

        async def watch() -> None:
            async for event in job.watch():
                sequences.append(event.sequence)

        watching, log = asyncio.create_task(watch()), asyncio.create_task(anext(job.logs(follow=True), None))
        server.kill9()
        listing = asyncio.create_task(farm.jobs(1))
        await shown.until(AWAY)
        await restart(server)
        async with asyncio.timeout(WAIT_S):
            assert [known.id for known in await listing] == [job.id]
            assert await job.wait() is JobState.SUCCEEDED
            await asyncio.gather(watching, log)
        numbers = [sequence for sequence in sequences if sequence]
        assert numbers == list(range(1, len(numbers) + 1))
        assert shown == [AWAY, BACK]


async def test_the_first_answer_is_waited_for(server: FarmProcess) -> None:
    server.kill9()
    shown = Shown()

    async def connect() -> str:
        async with AsyncFarm(server.address, on_status=shown) as farm:
            return (await farm.info()).version

    connecting = asyncio.create_task(connect())
    await shown.until(AWAY)
    await restart(server)
    async with asyncio.timeout(WAIT_S):
        assert await connecting


async def test_the_end_says_how_to_come_back_and_that_works(server: FarmProcess, tmp_path: Path) -> None:
    async with AsyncFarm(server.address, server_wait_s=0.2) as farm, waiting_job(server, farm) as job:
        command = ("jobs", "watch", job.id, "--server", server.address)
        watching = asyncio.create_task(command_of(tmp_path, *command, "--server-wait", "0.5s"))
        server.kill9()
        with refuses("SERVER_UNREACHABLE") as failed:
            await job.wait()
        way_back = f"Job {job.id} goes on: once the server is back, `etfarm jobs watch {job.id}` shows it."
        assert failed.value.remedy == way_back
        assert (await watching).returncode == 4
        await restart(server)
        done = await command_of(tmp_path, *command)
        assert (done.returncode, done.stderr.count(AWAY)) == (0, 0), done.stderr


async def test_a_command_says_once_that_it_waits(server: FarmProcess, tmp_path: Path) -> None:
    server.kill9()
    done = await command_of(tmp_path, "jobs", "list", "--server", server.address, "--server-wait", "1.5s")
    assert done.returncode == 4
    assert done.stderr.splitlines()[0] == AWAY
    assert (done.stderr.count(AWAY), done.stderr.count("\n")) == (1, 2), done.stderr


async def test_a_name_that_does_not_resolve_and_a_server_with_no_patience_fail_at_once(server: FarmProcess) -> None:
    server.kill9()
    async with asyncio.timeout(PROMPTLY_S):
        for address, wait_s in (("nosuch.invalid:7433", None), (server.address, 0.0)):
            shown = Shown()
            with pytest.raises(EtfarmError) as failed:
                async with AsyncFarm(address, on_status=shown, server_wait_s=wait_s):
                    pass
            assert (failed.value.reason, shown) == ("SERVER_UNREACHABLE", [])


@pytest.mark.parametrize("text", ["soon", "10", "-1s", ""])
def test_a_time_that_is_none_is_a_usage_error(text: str, tmp_path: Path) -> None:
    done = etfarm("jobs", "list", "--server", "127.0.0.1:1", "--server-wait", text, cwd=tmp_path)
    assert done.returncode == 2
    assert f"etfarm: --server-wait requires a duration or 0, got {text!r}. Give for example 10m" in done.stderr


async def test_the_variable_stands_for_the_option(server: FarmProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    server.kill9()
    monkeypatch.setenv("ETFARM_SERVER_WAIT", "0")
    async with asyncio.timeout(PROMPTLY_S):
        with pytest.raises(EtfarmError, match="does not answer"):
            async with AsyncFarm(server.address):
                pass
    monkeypatch.setenv("ETFARM_SERVER_WAIT", "a while")
    with pytest.raises(EtfarmError, match="ETFARM_SERVER_WAIT requires a duration or 0, got 'a while'"):
        AsyncFarm(server.address)


async def command_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(lambda: etfarm(*arguments, cwd=folder))
