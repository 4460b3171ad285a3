"""Reservations and watches through a real farm: jobs, sessions, commands, lost holders and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import grpc
import numpy as np
import psutil
import pytest

from etfarm.client import AsyncFarm, Farm
from etfarm.client.cli.commands import devices as devices_command
from etfarm.client.cli.commands import jobs as jobs_command
from etfarm.client.models import DeviceChange, JobInfo, JobState
from etfarm.v1 import device_pb2, device_pb2_grpc, job_pb2, job_pb2_grpc
from etfarm.wire.errors import EtfarmError
from tests.support.farm import PROMPTLY_S, Daemon, FarmProcess, etfarm, wait_until
from tests.support.programs import program
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow(reason="a farm with two agents runs programs")

ZERO = np.zeros(1, np.float32)
MANY = 40
"""Number of watchers that do not read."""
ROOM_BYTES = 16 << 20
"""Memory that they may cost together."""


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    with FarmProcess(tmp_path_factory.mktemp("reservations"), executes=True) as running:
        yield running.start(agents=2)


@pytest.fixture
def client(farm: FarmProcess) -> Iterator[Farm]:
    with farm.client() as connected:
        yield connected
        for reservation in connected.reservations():
            connected.release_reservation(reservation.id)


class Outcome(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(farm: FarmProcess, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `etfarm devices` in this process."""

    def called(subcommand: str, *arguments: str) -> Outcome:
        code = devices_command.main([subcommand, "--server", farm.address, *arguments])
        return Outcome(code, *capsys.readouterr())

    return called


def command(farm: FarmProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return etfarm(*arguments[:2], "--server", farm.address, *arguments[2:], cwd=farm.folder)


def start(farm: FarmProcess, *arguments: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "ETFARM_SERVER"}
    return subprocess.Popen(
        [sys.executable, "-m", "etfarm.wire.command", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=farm.folder, env=environment,
    )  # fmt: skip


def test_jobs_and_sessions_that_name_the_reservation_get_its_devices(client: Farm) -> None:
    pte = program("add").path
    with client.reserve("name=board-1", minutes=5, reason="a demo") as reservation:
        (board,) = [device for device in client.devices() if device.reservation is not None]
        assert (board.name, board.id) == ("board-1", reservation.device_ids[0])
        assert board.reservation is not None and board.reservation.reason == "a demo"
        other = client.run(pte, device="name=board-1")
        own = client.run(pte, reservation=reservation.id)
        assert own.result().report.device.name == "board-1"
        with client.session(program("counter").path, reservation=reservation.id) as session:
            assert session.device.name == "board-1"
            session.run("forward", ZERO)
        assert not other.refresh().state.is_terminal
        # The jobs of others go elsewhere.
        assert client.run(pte).result().report.device.name == "board-0"
    assert client.reservations() == []
    assert other.result().report.device.name == "board-1"


def test_a_job_whose_reservation_is_unknown_ended_or_elsewhere_is_refused(client: Farm) -> None:
    pte = program("add").path
    with client.reserve("name=board-0") as reservation:
        with refuses("DEVICE_NOT_RESERVED"):
            client.run(pte, device="name=board-1", reservation=reservation.id)
        ended = reservation.id
    for reservation_id, reason in ((ended, "RESERVATION_ENDED"), ("nothing", "RESERVATION_NOT_FOUND")):
        with pytest.raises(EtfarmError) as refused:
            client.run(pte, reservation=reservation_id)
        assert refused.value.reason == reason
        assert "etfarm devices" in refused.value.remedy
        with pytest.raises(EtfarmError) as of_session, client.session(program("counter").path, reservation=reservation_id):
            pytest.fail("the session has a device")
        assert of_session.value.reason == reason


def test_a_job_that_waits_when_its_reservation_ends_fails(client: Farm) -> None:
    with client.session(program("counter").path, device="name=board-0"):
        with client.reserve("name=board-0", minutes=5) as reservation:
            job = client.run(program("add").path, reservation=reservation.id)
            assert next(event for event in job.watch() if "is busy" in getattr(event, "message", ""))
        (cell,) = (job.wait(), job.info)[1].cells
    assert cell.error is not None and cell.error.reason == "RESERVATION_ENDED"
    again = job.retry()
    assert again.result().report.state == "SUCCEEDED", "it does without the reservation"


def test_a_command_runs_while_its_devices_are_reserved(farm: FarmProcess, client: Farm, run: Run) -> None:
    script = f"{shlex.quote(sys.executable)} -m etfarm.wire.command devices reservations --json - --server {farm.address}; exit 7"
    held = command(
        farm, "devices", "reserve", "", "--count", "2", "--for", "5m", "--", "sh", "-c", f"echo $ETFARM_RESERVATION; {script}"
    )
    reservation_id, _, document = held.stdout.partition("\n")
    assert held.returncode == 7, held.stderr
    (listed,) = json.loads(document)["reservations"]
    assert (listed["id"], len(listed["device_ids"])) == (reservation_id, 2)
    assert client.reservations() == []
    assert run("reserve", "", "--", "no-such-command").code == 127
    assert client.reservations() == []


def test_an_interrupted_command_is_ended_and_its_devices_are_released(farm: FarmProcess, client: Farm) -> None:
    holding = start(farm, "devices", "reserve", "", "--server", farm.address, "--", "sh", "-c", "echo started; exec sleep 600")
    assert holding.stdout is not None
    assert holding.stdout.readline() == "started\n"
    assert len(client.reservations()) == 1
    holding.send_signal(signal.SIGTERM)
    assert holding.wait(PROMPTLY_S) == 128 + signal.SIGTERM
    holding.communicate()
    assert client.reservations() == []


def test_devices_are_free_again_when_their_holder_is_gone(farm: FarmProcess, client: Farm) -> None:
    holding = start(
        farm, "devices", "reserve", "", "--for", "2s", "--server", farm.address, "--", "sh", "-c", "echo started; read x"
    )
    assert holding.stdout is not None
    assert holding.stdout.readline() == "started\n"
    (before,) = client.reservations()
    assert wait_until(lambda: client.reservations()[0].expires_at > before.expires_at), "it is renewed"
    holding.kill()
    holding.communicate()
    with client.reserve("", count=1):
        assert wait_until(lambda: before.id not in {each.id for each in client.reservations()})


def test_commands_show_who_holds_a_device(client: Farm, run: Run) -> None:
    reserved = run("reserve", "name=board-0", "--for", "10m", "--reason", "a demo")
    (reservation,) = client.reservations()
    assert reserved.out == f"{reservation.id}\n"
    assert f"reservation {reservation.id}: a demo" in run("show", "board-0").out
    assert "RESERVED BY" in run("list").out
    assert run("renew", reservation.id, "--for", "2h").code == 0
    assert client.reservations()[0].duration_s == 7200
    assert "a demo" in run("reservations").out
    assert run("release", reservation.id).code == 0
    refused = run("renew", reservation.id)
    assert (refused.code, refused.out) == (2, "")
    assert "was released by" in refused.err
    far = run("reserve", "", "--for", "30d")
    assert far.code == 2 and "1 s to 86,400 s" in far.err


def test_watches_of_devices_and_jobs_continue_after_a_restart(breakable: FarmProcess) -> None:
    breakable.start(agents=1)
    devices: list[DeviceChange] = []
    jobs: list[JobInfo] = []
    ready, offline, ended = threading.Event(), threading.Event(), threading.Event()

    def watch_devices() -> None:
        with breakable.client() as client:
            for change in client.watch_devices(telemetry=False):
                devices.append(change)
                ready.set()
                if change.device is not None and change.device.labels.get("rack") == "3":
                    offline.set()
                    return

    def watch_jobs() -> None:
        with breakable.client() as client:
            for job in client.watch_jobs():
                jobs.append(job)
                if job.state.is_terminal:
                    ended.set()
                    return

    threads = [threading.Thread(target=each) for each in (watch_devices, watch_jobs)]
    for thread in threads:
        thread.start()
    assert ready.wait(PROMPTLY_S)
    with breakable.client() as client:
        reservation = client.reserve_devices("", minutes=10)
        job = client.run(program("add").path)
        assert wait_until(lambda: bool(jobs))
        breakable.kill9()
        breakable.restart()
        assert [each.id for each in client.reservations()] == [reservation.id], "it outlives the server"
        client.label_device("board-0", {"rack": "3"})
        assert offline.wait(PROMPTLY_S * 2)
        client.release_reservation(reservation.id)
        assert ended.wait(60)
        assert (jobs[-1].id, jobs[-1].state, len(jobs[-1].cells)) == (job.id, JobState.SUCCEEDED, 1)
    for thread in threads:
        thread.join(PROMPTLY_S)
        assert not thread.is_alive()
    assert any(change.device is not None and change.device.reservation is not None for change in devices)


def test_commands_follow_devices_and_jobs_line_by_line(
    farm: FarmProcess, client: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    watching = Daemon(["devices", "list", "--watch", "--server", farm.address], farm.folder / "devices.log")
    following = Daemon(["jobs", "watch", "--all", "--server", farm.address], farm.folder / "jobs.log")
    for daemon in (watching, following):
        daemon.start()
    watching.expect("board-1 (")
    with client.reserve("name=board-1", reason="a demo"):
        watching.expect("reserved by local until", PROMPTLY_S)
    first, second = client.run(program("add").path), client.run(program("add").path, name="second")
    following.expect(f"{second.id} second: SUCCEEDED, 1 of 1 cells done", 60)
    capsys.readouterr()
    assert jobs_command.main(["watch", "--server", farm.address, first.id, second.id]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == {first.id, f"{second.id} second"}
    for daemon in (watching, following):
        daemon.signal(signal.SIGINT)
        assert daemon.process is not None
        assert daemon.process.wait(PROMPTLY_S) == 128 + signal.SIGINT


async def test_watchers_that_do_not_read_cost_no_memory(farm: FarmProcess) -> None:
    assert farm.server is not None
    server = psutil.Process(farm.server.pid)
    labels = {f"key-{number}": "x" * 200 for number in range(50)}
    # Without probes, the client takes 64 KiB of a stream that it does not read, and not megabytes.
    options = [("grpc.http2.bdp_probe", 0)]
    async with AsyncFarm(farm.address) as client, grpc.aio.insecure_channel(farm.address, options=options) as channel:
        device = (await client.devices("name=board-0"))[0]
        devices, jobs = device_pb2_grpc.DeviceServiceStub(channel), job_pb2_grpc.JobServiceStub(channel)
        streams = [devices.Watch(device_pb2.WatchDevicesRequest(telemetry=True)) for _ in range(MANY)]
        others = [jobs.WatchAll(job_pb2.WatchAllJobsRequest()) for _ in range(MANY)]
        for stream in (*streams, *others):
            assert await stream.read()  # the first message only
        before = server.memory_info().rss
        for change in range(400):  # 4 MiB a watcher
            await client.label_device(device.id, labels | {"number": str(change)})
        grown = server.memory_info().rss - before
        assert grown < ROOM_BYTES, f"{grown >> 20} MiB"
        # Whoever reads then gets the latest state, and not each one.
        received = 0
        number = ""
        async with asyncio.timeout(PROMPTLY_S):
            while number != "399":
                event = await streams[0].read()
                received += event.HasField("device")
                number = event.device.labels.get("number", "")
        assert received < 50
        for stream in (*streams, *others):
            stream.cancel()
        await client.label_device(device.id, {}, remove=[*labels, "number"])


def test_telemetry_is_stored_and_shown(client: Farm, run: Run) -> None:
    assert wait_until(lambda: bool(client.device_telemetry("board-0")), PROMPTLY_S)
    heads, *rows = run("telemetry", "board-0", "--since", "1h").out.splitlines()
    assert heads.split()[0] == "TIME" and "MEMORY_AVAILABLE_BYTES" in heads and rows
    listed = json.loads(run("telemetry", "board-0", "--json", "-").out)
    assert listed["telemetry"][0]["values"]["memory_available_bytes"] > 0
    future = datetime.now(UTC) + timedelta(hours=1)
    assert client.device_telemetry("board-0", since=future) == []
    with refuses("BAD_TIME_RANGE"):
        client.device_telemetry("board-0", since=future, until=datetime.now(UTC))
