"""Devices that compute wrongly, lie, hang, or run a program that crashes, with real servers, agents and runners."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client import AsyncFarm, Farm
from etfarm.client.models import DeviceHealth, HealthState, JobState
from etfarm.wire.errors import EtfarmError
from tests.support.credentials import ADMIN
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.faults import faulty_archive, faulty_program
from tests.support.programs import program
from tests.support.refusals import refuses
from tests.support.runner import runner_archive
from tests.support.simulated_agent import Act, SimulatedAgent
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="starts servers with agents that misbehave, and waits for probes")

ACTS_AS = ADMIN

SETTINGS = """
probe_s = 0.2
max_probe_s = 1.0
good_runs = 2
[[power]]
command = ["{script}", "{{label.pdu}}"]
after_s = 1
min_interval_s = 3600
"""

FAULTY_MEMORY = '''
"""An agent whose device returns an output with a flipped bit as long as a file exists."""
import os
from etfarm.wire import tensors

encode = tensors.encode

def encode_wrongly(values):
    data = bytearray(encode(values))
    if os.path.exists({broken!r}):
        data[-5] ^= 1
    return bytes(data)

tensors.encode = encode_wrongly
'''

FALSE_INVENTORY = '''
"""An agent that announces a runner which it cannot start: it has no ExecuTorch."""
import sys
sys.modules["executorch"] = None
from etfarm.device_agents.daemon import own_runners
from etfarm.v1 import common_pb2, device_pb2

async def announce(folder, answer_s=0.0):
    return [device_pb2.DeviceRunner(kind=common_pb2.RUNNER_KIND_PYTHON, executorch="9", backends=["XnnpackBackend"])]

own_runners.own_runners = announce
'''


def health(farm: Farm, device: str = "board-0") -> DeviceHealth:
    return farm.device(device).health


def becomes(farm: Farm, state: HealthState, device: str = "board-0") -> DeviceHealth:
    assert wait_until(lambda: health(farm, device).state is state, 60), health(farm, device)
    return health(farm, device)


def misbehaving(folder: Path, code: str) -> dict[str, str]:
    """Return the environment of an agent that executes code at its start."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def settings(folder: Path) -> Path:
    """Return a file with short probes, and a power command that writes its argument beside it."""
    script = folder / "cycle"
    script.write_text(f'#!/bin/sh\necho "$1" >> {folder / "cycled"}\necho "outlet $1 is on"\n')
    script.chmod(0o700)
    path = folder / "health.toml"
    path.write_text(SETTINGS.format(script=script))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("health")


@pytest.fixture(scope="module")
def farm(folder: Path) -> Iterator[FarmProcess]:
    """A farm with health runs, and a device whose programs may have faulty kernels."""
    with FarmProcess(folder, bundle=False, serve=("--health-interval", "3600", "--health", str(settings(folder)))) as running:
        running.start(agents=0)
        with running.client() as client:
            client.add_bundle(faulty_archive())
        running.add_agent()
        yield running


def test_a_new_device_becomes_good_and_people_see_it(farm: FarmProcess, tmp_path: Path) -> None:
    with farm.client() as client:
        becomes(client, HealthState.GOOD)
        (event,) = client.device_health("board-0")
        assert event.run is not None and event.run.passed and event.run.trigger == "ENROLMENT"
        assert event.run.p50_ns is not None and event.run.p50_ns > 0
    server = ("--server", farm.address)
    listed = etfarm("devices", "list", *server, cwd=tmp_path)
    assert "HEALTH" in listed.stdout and "GOOD" in listed.stdout
    checked = etfarm("devices", "check", "board-0", *server, cwd=tmp_path)
    assert checked.returncode == 0 and "it passed" in checked.stdout, checked.stderr
    shown = etfarm("devices", "show", "board-0", *server, cwd=tmp_path)
    assert "first run, it passed" in shown.stdout and "requested, it passed" in shown.stdout
    document = json.loads(etfarm("devices", "health", "board-0", "--limit", "1", "--json", "-", *server, cwd=tmp_path).stdout)
    assert document["schema"] == "etfarm.health_events/1"
    assert [event["run"]["trigger"] for event in document["health_events"]] == ["REQUEST"]


def test_a_users_program_that_crashes_leaves_the_device_good(farm: FarmProcess, tmp_path: Path) -> None:
    crashing = tmp_path / "crashing.pte"
    crashing.write_bytes(faulty_program("abt"))
    with farm.client() as client:
        becomes(client, HealthState.GOOD)
        before = len(client.device_health("board-0"))
        for _ in range(3):
            job = client.bench(crashing, iterations=1, profile=False)
            assert job.wait() is JobState.FAILED
            with pytest.raises(EtfarmError) as raised:
                assert job.result().report
            assert (raised.value.reason, raised.value.metadata["self_test"]) == ("PROGRAM_CRASHED", "passed")
        assert health(client).state is HealthState.GOOD
        assert health(client).fault_score == 0
        assert len(client.device_health("board-0")) == before, "not even an event"


@pytest.mark.remedy("WRONG_OUTPUTS")
def test_a_device_with_wrong_outputs_is_quarantined_and_readmitted_once_it_is_right(farm: FarmProcess, tmp_path: Path) -> None:
    broken, model = tmp_path / "broken", tmp_path / "add.pte"
    model.write_bytes(program("add").bytes)
    broken.touch()
    agent = farm.add_agent(environment=misbehaving(tmp_path, FAULTY_MEMORY.format(broken=str(broken))))
    try:
        with farm.client() as client:
            name = f"board-{len(farm.agents) - 1}"
            known = becomes(client, HealthState.QUARANTINED, name)
            assert "of the health program's output are wrong" in known.reason
            listed = etfarm("devices", "list", "--server", farm.address, cwd=tmp_path)
            assert f"{name}: quarantined, its health run failed at" in " ".join(listed.stdout.split())

            def fails_the_check() -> bool:
                """Whether a requested run fails; a probe may be in progress, and then it is refused."""
                checked = etfarm("devices", "check", name, "--server", farm.address, cwd=tmp_path)
                assert checked.returncode in (1, 2)
                return checked.returncode == 1 and "output are wrong" in checked.stderr

            assert wait_until(fails_the_check)
            job = client.bench(model, devices=f"name={name}", iterations=1, profile=False)
            time.sleep(1)
            assert job.state in (JobState.QUEUED, JobState.RUNNING), "it waits"
            broken.unlink()
            assert job.wait() is JobState.SUCCEEDED
            assert health(client, name).state is HealthState.GOOD
            kinds = [event.reason for event in client.device_health(name) if event.run is not None]
            assert kinds[:2] == ["", ""] and kinds[-1] == "WRONG_OUTPUTS"
    finally:
        agent.stop()


def test_an_admin_can_clear_a_device(farm: FarmProcess, tmp_path: Path) -> None:
    cleared = etfarm("devices", "clear", "board-0", "--server", farm.address, cwd=tmp_path)
    assert cleared.returncode == 0 and "is GOOD" in cleared.stderr + cleared.stdout
    with farm.client() as client:
        assert client.device_health("board-0", limit=1)[0].kind == "CLEARED"


def test_a_hung_board_is_power_cycled_once(farm: FarmProcess, folder: Path) -> None:
    agent = farm.add_agent()
    name = f"board-{len(farm.agents) - 1}"
    with farm.client() as client:
        client.label_device(name, {"pdu": "7"})
        agent.kill9()
        cycled = folder / "cycled"
        assert wait_until(cycled.exists, 60)
        assert wait_until(lambda: any(event.exit_code is not None for event in client.device_health(name)))
        (event,) = [event for event in client.device_health(name) if event.kind == "POWER_CYCLED"]
        assert event.exit_code == 0 and event.message.endswith("exit code 0: outlet 7 is on")
        time.sleep(2.5)
        assert cycled.read_text() == "7\n"


def test_a_device_that_lies_about_its_inventory_is_quarantined_until_it_has_a_runner(tmp_path: Path) -> None:
    with FarmProcess(tmp_path, bundle=False, serve=("--health-interval", "3600", "--health", str(settings(tmp_path)))) as farm:
        farm.start(agents=0)
        farm.add_agent(bare=True, environment=misbehaving(tmp_path, FALSE_INVENTORY))
        with farm.client() as client:
            known = becomes(client, HealthState.QUARANTINED)
            assert "its health run failed at" in known.reason
            client.add_bundle(runner_archive())
            becomes(client, HealthState.GOOD)


def test_a_server_restart_and_a_stopped_agent_cost_no_health(tmp_path: Path) -> None:
    model = tmp_path / "add.pte"
    model.write_bytes(program("add").bytes)
    with FarmProcess(tmp_path, serve=("--health-interval", "3600", "--patience", "0.5")) as farm:
        farm.start()
        with farm.client() as client:
            becomes(client, HealthState.GOOD)
            job = client.bench(model, min_time_s=30.0, profile=False)
            until_phase(job, "TIMED")
            farm.kill9()
            farm.agents[0].kill9()
            farm.restart()
            assert wait_until(lambda: health(client).state is HealthState.GOOD)
            time.sleep(1.5)
            assert [event.kind for event in client.device_health("board-0")] == ["RUN"]
            job.cancel()


async def test_a_server_that_stops_ends_its_health_runs_and_tells_who_waits(tmp_path: Path) -> None:
    farm = FarmProcess(tmp_path, bundle=False, serve=("--health-interval", "3600", "--drain-timeout", "60"))
    try:
        await asyncio.to_thread(farm.start, agents=0)
        server = farm.server
        assert server is not None and server.process is not None
        async with SimulatedAgent(farm.address, "board", act=lambda _: Act.HANG) as agent, AsyncFarm(farm.address) as client:
            await agent.until(lambda: len(agent.started) == 1)
            asked = asyncio.create_task(client.check_device("board"))
            await agent.until(lambda: len(agent.started) == 2)
            server.signal(signal.SIGTERM)
            with refuses("HEALTH_RUN_ABORTED", match="about to stop"):
                await asked
            assert await asyncio.to_thread(server.process.wait, 30) == 0, "it does not wait for the device"
    finally:
        await asyncio.to_thread(farm.stop)
