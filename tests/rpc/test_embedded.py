"""The embedded farm with its real server and agent: shared by commands, and stopped with its last user."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from etfarm.client.aio import AsyncFarm
from etfarm.client.embedded import lease as embedded_lease
from etfarm.client.embedded.lease import Place
from etfarm.client.embedded.supervisor import last_words
from etfarm.client.errors import EmbeddedFarmFailed
from etfarm.v1 import farm_pb2, farm_pb2_grpc
from etfarm.wire import names
from etfarm.wire.channel import Access, open_channel
from tests.support.farm import FarmProcess, wait_until
from tests.support.programs import program
from tests.support.runner import know_own_runners

pytestmark = pytest.mark.slow(reason="starts an embedded farm for each test")

join = partial(embedded_lease.join, prewarm=False)
"""Nothing is compiled here."""


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of a farm that has built its runner, and of an agent that knows this machine's own."""
    with FarmProcess(tmp_path_factory.mktemp("used")) as farm:
        farm.start(agents=0)
    know_own_runners(farm.folder / "agent")
    return farm.folder


@pytest.fixture
def place(used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A separate data folder that was used before; processes that still run there afterwards fail the test."""
    monkeypatch.setenv(names.DATA_VARIABLE, str(tmp_path))
    monkeypatch.delenv(names.SERVER_VARIABLE, raising=False)
    here = Place.of_user()
    here.make()
    for name in ("server", "agent"):
        shutil.copytree(used / name, here.data / name)
    yield here
    left = _processes(here)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _processes(place: Place) -> list[int]:
    """Return the processes whose command line names the farm's folder."""
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(str(place.data)) in command:
                result.append(int(entry.name))
    return result


def _command(pid: int) -> list[bytes]:
    """Return the arguments of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _servers(place: Place) -> list[list[bytes]]:
    """Return the commands of the farm's servers."""
    return [command for command in map(_command, _processes(place)) if b"serve" in command]


def _supervisor(place: Place) -> int:
    (pid,) = (
        pid for pid in _processes(place) if b"etfarm.client.embedded.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return pid


async def _all_gone(place: Place) -> None:
    """Wait until the lock that every process of the farm holds is free."""
    os.close(await asyncio.to_thread(place.lock, "running"))


async def test_the_last_user_leaves_no_processes(place: Place) -> None:
    statuses: list[str] = []
    lease = await join(on_status=statuses.append)
    assert lease.address == f"unix:{place.server_socket}"
    assert stat.S_IMODE(place.data.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.supervisor_socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.address_file.stat().st_mode) == 0o600
    assert any("server" in status for status in statuses)
    await lease.leave()
    assert _processes(place) == []
    assert not place.supervisor_socket.exists() and not place.server_socket.exists() and not place.address_file.exists()


async def test_the_socket_requires_a_token(place: Place) -> None:
    lease = await join()
    assert stat.S_IMODE(place.token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.server_socket.stat().st_mode) == 0o600
    secret = place.token_file.read_text().split()[-1]
    try:
        for token, code in (
            ("", grpc.StatusCode.UNAUTHENTICATED),
            (f"{secret}x", grpc.StatusCode.UNAUTHENTICATED),
            (secret, None),
        ):
            async with open_channel(Access(lease.address, token)) as channel:
                failed = None
                try:
                    await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
                except grpc.aio.AioRpcError as error:
                    failed = error.code()
            assert failed is code
        # Commands of this user find the secret by themselves, and no process shows it.
        assert Access.of(lease.address).token == secret
        for pid in _processes(place):
            assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        await lease.leave()
    assert not place.token_file.exists()
    again = await join()
    assert place.token_file.read_text().split()[-1] != secret
    await again.leave()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_cannot_join(place: Place) -> None:
    lease = await join()
    # As if the farm's folder did not keep others out.
    place.data.chmod(0o711)
    place.supervisor_socket.chmod(0o666)
    code = (
        "import os, socket; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        f"s.connect({place.supervisor_socket.name!r}); print('connected', flush=True); s.sendall(b'{{}}\\n'); print(s.recv(100))"
    )
    stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE, cwd=place.data)
    text, _ = await stranger.communicate()
    place.data.chmod(0o700)
    assert text.startswith(b"connected") and b"{" not in text, "it was answered"
    assert not await embedded_lease.is_lasting()
    await lease.leave()


async def test_concurrent_commands_share_a_farm(place: Place) -> None:
    leases = await asyncio.gather(*(join() for _ in range(4)))
    assert len({lease.address for lease in leases}) == 1
    assert len(_processes(place)) >= 3
    async with AsyncFarm(leases[0].address) as farm:
        (device,) = await farm.devices()
        assert device.health.next_run_at is None, "no health run delays the job of a command"
    supervisor = _supervisor(place)
    for lease in leases[:-1]:
        await lease.leave()
    assert _supervisor(place) == supervisor
    await leases[-1].leave()


async def test_a_command_that_starts_during_shutdown_gets_a_farm(place: Place) -> None:
    for _ in range(3):
        first = await join()
        leaving = asyncio.create_task(first.leave())
        await asyncio.sleep(0)
        second = await join()
        await leaving
        assert _processes(place), "the second one's farm is gone with the first one"
        await second.leave()
    assert _processes(place) == []


async def test_a_killed_command_ends_its_farm(place: Place) -> None:
    code = "import asyncio, sys; from etfarm.client.embedded.lease import join\nasync def main():\n lease = await join(prewarm=False); print('joined', flush=True); await lease.lost()\nasyncio.run(main())"  # noqa: E501
    command = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert command.stdout is not None
    assert await command.stdout.readline() == b"joined\n"
    command.kill()
    await command.wait()
    await _all_gone(place)
    assert _processes(place) == []


@pytest.mark.remedy("EMBEDDED_FARM_FAILED")
async def test_a_killed_supervisor_ends_its_children_and_is_reported(place: Place) -> None:
    lease = await join()
    os.kill(_supervisor(place), signal.SIGKILL)
    with pytest.raises(EmbeddedFarmFailed):
        await lease.lost()
    await lease.leave()
    await _all_gone(place)
    assert [pid for pid in _processes(place) if Path(f"/proc/{pid}/cmdline").read_bytes()] == []
    # What it left behind does not keep a new one from starting.
    again = await join()
    await again.leave()


@pytest.mark.parametrize("prewarm", [True, False])
async def test_the_server_loads_the_compiler_if_the_first_command_compiles(place: Place, prewarm: bool) -> None:
    lease = await embedded_lease.join(prewarm=prewarm)
    (server,) = _servers(place)
    assert (b"--no-prewarm" in server) is not prewarm
    await lease.leave()


@pytest.mark.parametrize(("model", "prewarm"), [("add.pte", False), ("demo:resnet8", True)])
async def test_a_command_loads_the_compiler_only_for_what_it_compiles(place: Place, model: str, prewarm: bool) -> None:
    shutil.copy(program("add").path, place.data.parent / "add.pte")
    command = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "etfarm.wire.command",
        "bench",
        model,
        cwd=place.data.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert await asyncio.to_thread(wait_until, lambda: bool(_servers(place)))
        (server,) = _servers(place)
        assert (b"--no-prewarm" in server) is not prewarm
    finally:
        command.kill()
        await command.wait()
        await _all_gone(place)


async def test_a_persistent_farm_is_recognized(place: Place) -> None:
    assert not await embedded_lease.is_lasting()
    up = await join(kind="up")
    assert await embedded_lease.is_lasting()
    guest = await join()
    assert guest.lasting
    await guest.leave()
    await up.leave()
    assert not await embedded_lease.is_lasting()


async def test_a_second_up_names_the_first_and_ends(place: Place) -> None:
    first = await join(kind="up")
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "etfarm.wire.command", "up", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )  # fmt: skip
    out, error = await second.communicate()
    assert (second.returncode, out) == (1, b"")
    assert f"Another `etfarm up`, process {os.getpid()}, keeps the embedded farm at {first.address} running." in error.decode()
    guest = await join()
    assert guest.keeper_pid == os.getpid(), "the first one is undisturbed"
    await guest.leave()
    await first.leave()


async def test_a_server_that_cannot_start_reports_the_reason(place: Place) -> None:
    shutil.rmtree(place.data / "server")
    (place.data / "server").write_text("in the way")
    with pytest.raises(EmbeddedFarmFailed, match="server ended with exit code"):
        await join()
    await _all_gone(place)


async def test_a_killed_server_is_reported_as_killed_only(place: Place) -> None:
    lease = await join()
    server = next(pid for pid in _processes(place) if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(server, signal.SIGKILL)
    with pytest.raises(EmbeddedFarmFailed) as caught:
        await lease.lost()
    assert caught.value.message == f"The embedded farm's server was killed by SIGKILL. Its log is {place.data / 'serve.log'}."
    await lease.leave()
    await _all_gone(place)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("", ""),
        ("Traceback (most recent call last):\n  File x\nValueError: no such thing\n", "ValueError: no such thing."),
        (
            "etfarm: The port is taken. Give another.\ntimestamp='2026-01-01' level='info' event='stopped'\n",
            "The port is taken. Give another.",
        ),
        ("timestamp='2026-01-01' level='info' event='started'\n", ""),
        ("etfarm agent: It has no disk.\n", "It has no disk."),
    ],
)
def test_only_the_relevant_lines_of_a_log_are_quoted(log: str, expected: str) -> None:
    assert last_words(log) == expected


async def test_a_long_data_path_has_its_sockets_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.DATA_VARIABLE, str(tmp_path / ("long" * 30)))
    place = Place.of_user()
    assert len(str(place.server_socket)) <= embedded_lease.LONGEST_SOCKET_PATH
    lease = await join()
    assert stat.S_IMODE(place.sockets.stat().st_mode) == 0o700
    await lease.leave()
    assert _processes(place) == []
    assert not place.sockets.exists()
