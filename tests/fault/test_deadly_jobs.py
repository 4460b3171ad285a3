"""Servers that die again and again: innocent jobs go on at once, and a job that ends the server is set aside."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from etfarm.v1 import common_pb2, job_pb2
from tests.support import models
from tests.support.databases import PostgresDatabases
from tests.support.farm import Daemon, FarmProcess
from tests.support.farm_calls import LIVE, FarmCalls, farm_calls
from tests.support.programs import program
from tests.support.servers import Servers
from tests.support.simulated_agent import SELECTOR, SimulatedAgent

pytestmark = pytest.mark.slow(reason="starts servers again and again, some with a compiler")

DEADLY = '''
"""A server with a bug: it dies of a segmentation fault while it compiles, or checks the result of, a job with a certain name."""
import ctypes
from etfarm.server.jobs.cells.stages import CellCompilation
from etfarm.server.jobs.cells.results import Results

def die_in(owner, method, name):
    function = getattr(owner, method)

    async def call(self, *arguments):
        if any(getattr(each, "job", None) is not None and each.job.name == name for each in arguments):
            ctypes.string_at(0)
        return await function(self, *arguments)

    setattr(owner, method, call)

die_in(CellCompilation, "compile", "dies in compile")
die_in(Results, "_check_cell", "dies in check")
'''
KILLS = 4
RUN_S = 30.0
"""Longer than the kills take."""
DEADLINE_S = 600.0
"""For several starts of a server on a busy machine; each may be waited for in vain, as it may die before it listens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.conv, tmp_path_factory.mktemp("model") / "conv.pt2")


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a server with the bug."""
    folder = tmp_path_factory.mktemp("deadly")
    (folder / "sitecustomize.py").write_text(DEADLY)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def buggy(tmp_path: Path, deadly: dict[str, str]) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path, bundle=False, environment=deadly) as running:
        yield running


class Kept:
    """A server that is started again whenever it dies, as by a service manager."""

    def __init__(self, start: Callable[[], Any], daemon: Callable[[], Daemon | None]) -> None:
        self._start, self._daemon = start, daemon
        self.deaths = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Kept:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._is_over.wait(0.05):
            daemon = self._daemon()
            assert daemon is not None and daemon.process is not None
            if daemon.process.poll() is not None:
                self.deaths += 1
                with suppress(AssertionError):  # it may die before it listens
                    self._start()


@asynccontextmanager
async def agents_of(addresses: str, count: int, run_s: float = 0.0) -> AsyncIterator[list[SimulatedAgent]]:
    async with AsyncExitStack() as closing:
        yield [
            await closing.enter_async_context(SimulatedAgent(addresses, f"sim-{number}", run_s=run_s)) for number in range(count)
        ]


async def spec_of(calls: FarmCalls, name: str = "", *, on_device: bool = True) -> job_pb2.JobSpec:
    devices = [job_pb2.DeviceChoice(selector=SELECTOR)] if on_device else []
    return job_pb2.JobSpec(name=name, candidates=[await calls.program(program("add").bytes, "add")], devices=devices)


async def end_of(calls: FarmCalls, job_id: str) -> job_pb2.Job:
    """Wait until a job is over, however often the server dies meanwhile."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            job: job_pb2.Job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job_id), give_up_s=DEADLINE_S)
            if job.state not in LIVE:
                return job
            await asyncio.sleep(0.2)  # watches break with each server


async def test_jobs_go_on_at_once_however_often_their_server_is_killed(breakable: FarmProcess, model: Path) -> None:
    breakable.restart()
    await asyncio.to_thread(breakable.create_projects)
    log = breakable.folder / "serve.log"
    async with agents_of(breakable.address, 4, RUN_S) as agents, farm_calls(breakable.address) as calls:
        spec = await spec_of(calls)
        running = [(await calls.submit(spec)).id for _ in agents]
        for agent in agents:
            await agent.until(lambda agent=agent: len(agent.active) == 1)  # type: ignore[misc]
        with breakable.client() as farm:
            compiling = [(await asyncio.to_thread(farm.compile, model, recipe="xnnpack_fp32")).id for _ in range(4)]
        for kills in range(1, KILLS + 1):
            before = [agent.connections for agent in agents]
            breakable.kill9()
            await asyncio.to_thread(breakable.restart)
            assert log.read_text().count("taking up a job") == kills * (len(running) + len(compiling))
            for agent, connections in zip(agents, before, strict=True):
                await agent.until(lambda agent=agent, connections=connections: agent.connections > connections)  # type: ignore[misc]
        assert [len(agent.active) for agent in agents] == [1] * len(agents), "the attempts take longer than the kills"
        for job_id in (*running, *compiling):
            assert (await end_of(calls, job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
        assert [list(agent.started.values()) for agent in agents] == [[1]] * len(agents), "each attempt ran once"
    assert "a job that a server died with" not in log.read_text()


@pytest.mark.parametrize("stage", ["compile", "check"])
async def test_a_job_that_ends_the_server_is_set_aside_and_others_go_on(buggy: FarmProcess, stage: str) -> None:
    buggy.restart()
    await asyncio.to_thread(buggy.create_projects)
    with Kept(buggy.restart, lambda: buggy.server) as kept:
        async with agents_of(buggy.address, 4, 1.0) as agents, farm_calls(buggy.address) as calls:
            spec = await spec_of(calls)
            innocent = [(await calls.submit(spec)).id for _ in range(7)]
            guilty = await calls.submit(await spec_of(calls, f"dies in {stage}"))
            (cell,) = (await end_of(calls, guilty.id)).cells
            assert (cell.error.reason, cell.error.fault) == ("SET_ASIDE", common_pb2.FAULT_FARM)
            assert "Submit the job again" in cell.error.remedy
            for job_id in innocent:
                assert (await end_of(calls, job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
            started = sum((agent.started for agent in agents), start=agents[0].started - agents[0].started)
            assert set(started.values()) == {1}, "each attempt ran once"
    log = (buggy.folder / "serve.log").read_text()
    assert kept.deaths == log.count("the former server died by a fault of its own") == 3
    assert "fault='Segmentation fault'" in log and "sitecustomize.py" in log, "the admin finds the cause in the log"


async def test_a_job_that_ends_one_leader_after_the_other_is_set_aside(
    tmp_path: Path, deadly: dict[str, str], postgres_databases: PostgresDatabases
) -> None:
    with postgres_databases.server.new_database() as url, Servers(tmp_path, url) as servers:
        both = [servers.add(environment=deadly) for _ in range(2)]
        async with agents_of(servers.addresses, 4, 1.0), farm_calls(servers.addresses) as calls:
            with ExitStack() as keeping:
                kept = [keeping.enter_context(Kept(each.start, lambda each=each: each.daemon)) for each in both]  # type: ignore[misc]
                spec = await spec_of(calls)
                innocent = [(await calls.submit(spec)).id for _ in range(7)]
                guilty = await calls.submit(await spec_of(calls, "dies in check"))
                (cell,) = (await end_of(calls, guilty.id)).cells
                assert cell.error.reason == "SET_ASIDE"
                for job_id in innocent:
                    assert (await end_of(calls, job_id)).state == job_pb2.JOB_STATE_SUCCEEDED
        assert all(each.deaths for each in kept)
