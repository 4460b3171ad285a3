"""Boards that lack what others have: /sys, a machine id, a disk that takes files, the right runner. Each is a real agent that
sees such a machine: in a mount namespace of its own, of a user namespace, which takes no rights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from etfarm.v1 import agent_pb2, common_pb2, job_pb2
from tests.support.agent import Launch, Server, join, launch, server
from tests.support.emulation import aarch64_archive
from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="starts an agent for each kind of board")

__all__ = ["join", "launch", "server"]

QUICK: Final = job_pb2.Measurement(min_time_s=0.3, iterations=10)


def board(script: str, *arguments: str | Path) -> list[str]:
    """Return what stands before a command that sees the machine as the script makes it; `$1` and on are the arguments."""
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    done = subprocess.run([*enter, "mount -t tmpfs none /mnt"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs user namespaces: {done.stderr}")
    return [*enter, f'{script}\nshift {len(arguments)}\nexec "$@"', "sh", *map(str, arguments)]


NO_SYS: Final = "mount -t tmpfs none /sys"
# Without the rights over it that a namespace gives to who made it.
UNREADABLE_SYS: Final = f'{NO_SYS} -o mode=000\nset -- unshare --user "$@"'


@pytest.mark.parametrize("script", [NO_SYS, UNREADABLE_SYS], ids=["absent", "unreadable"])
async def test_a_board_with_an_empty_sys_can_measure(server: Server, join: Launch, script: str) -> None:
    agent, connection = await join("--governor", "performance", "--cool-down", "1", within=board(script))
    device = connection.hello.devices[0]
    assert device.cores == sum(len(cluster.cpus) for cluster in device.clusters) > 0
    assert device.memory_bytes > 0 and device.arch
    assert not any(cluster.governor or cluster.HasField("max_frequency_hz") for cluster in device.clusters)
    for attempt in ("a1", "a2"):
        cell = await connection.run(server.candidate("conv"), measurement=QUICK, attempt=attempt)
        assert not cell.HasField("error"), cell.error
        assert cell.iterations >= 10 and cell.telemetry.cpu_time_ns > 0
        for reading in (cell.telemetry.before, cell.telemetry.after):
            assert reading.HasField("cpu_busy_ns") and not reading.zones and not reading.cpus
            assert not reading.HasField("battery_share")
    beat = await connection.until(lambda message: bool(message.heartbeat.telemetry[device.id].memory_available_bytes))
    assert not beat.heartbeat.telemetry[device.id].HasField("temperature_c")
    assert "telemetry cannot be read" not in agent.log


def test_an_unavailable_governor_is_refused_at_start(tmp_path: Path) -> None:
    policy = "/sys/devices/system/cpu/cpufreq/policy0"
    script = f"""{NO_SYS}; mkdir -p {policy}; echo powersave > {policy}/scaling_governor
    echo 0-1023 > {policy}/related_cpus; echo powersave userspace > {policy}/scaling_available_governors"""
    started = [sys.executable, "-m", "etfarm.wire.command", "agent", "--server", "127.0.0.1:1", "--data", str(tmp_path)]
    refused = subprocess.run(
        [*board(script), *started, "--governor", "nosuch"], capture_output=True, text=True, timeout=60, check=False
    )
    text = "etfarm: The kernel has no governor 'nosuch' here. Give --governor one of powersave, userspace, or keep.\n"
    assert (refused.returncode, refused.stderr) == (2, text)


@pytest.mark.parametrize("content", [None, "", "uninitialized\n", "\0" * 33], ids=["no_etc", "empty", "new_image", "zeros"])
async def test_boards_without_a_machine_id_are_separate_devices(
    server: Server, launch: Launch, tmp_path: Path, content: str | None
) -> None:
    machine_id = tmp_path / "machine-id"
    machine_id.write_text(content or "")
    script = "mount -t tmpfs none /etc" if content is None else 'mount --bind "$1" /etc/machine-id'
    seen = set()
    for home in ("one", "other"):
        data = tmp_path / home / "etfarm" / "agent"  # the default: others have an id of their own in any case
        where = {"XDG_DATA_HOME": str(tmp_path / home), "ETFARM_DATA": ""}
        for _ in ("first", "again"):
            agent = await launch(data=data, within=board(script, machine_id), **where)
            hello = (await server.connected()).hello
            assert hello.devices[0].id == hello.agent_id == (data / "agent_id").read_text().strip()
            seen.add(hello.agent_id)
            agent.process.terminate()
            await agent.ended()
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('mount -t tmpfs -o ro none "$1"', "Read-only file system"),
        # As ext4 does by itself when a card begins to fail.
        ('mount -t tmpfs none "$1"; mkdir "$1"/results; touch "$1"/lock; mount -o remount,ro "$1"', "Read-only file system"),
        ('mount -t tmpfs -o size=8k,mode=700 none "$1"; head -c 8192 /dev/zero > "$1"/full', "No space left on device"),
        ('umount "$1" 2>/dev/null || rm -r "$1"; touch "$1"', "File exists"),
    ],
    ids=["read_only", "remounted", "full", "file"],
)
async def test_an_unwritable_data_folder_is_a_single_error_line(
    server: Server, launch: Launch, tmp_path: Path, script: str, why: str
) -> None:
    data = tmp_path / "agent"
    agent = await launch(within=board(script, data))
    assert await agent.ended() == 2
    assert agent.log == (
        f"etfarm: The agent cannot work in its data folder {data}: {why}. "
        "Make it writable and free some space, or give another one with --data.\n"
    )


async def test_a_full_disk_is_a_device_fault_and_the_agent_stays(server: Server, join: Launch, tmp_path: Path) -> None:
    _, connection = await join(within=board('mount -t tmpfs -o size=3m none "$1"', tmp_path / "agent"))
    for attempt in ("a1", "a2"):
        cell = await connection.run(server.candidate("add"), attempt=attempt)
        assert (cell.error.reason, cell.error.fault) == ("DEVICE_DISK_FULL", common_pb2.FAULT_DEVICE)
        assert "the device's disk has" in cell.error.message.lower() and "--cache-limit" in cell.error.remedy
        connection.ack(attempt)
    beats = len(connection.received)
    await connection.until(lambda message: message.HasField("heartbeat"), beats)


async def test_an_agent_works_under_the_restrictions_of_its_systemd_unit(server: Server, join: Launch, tmp_path: Path) -> None:
    data, scratch = tmp_path / "agent", tmp_path / "tmp"
    scratch.mkdir()
    data.mkdir()
    script = 'for each in "$1" "$2"; do mount --bind "$each" "$each"; done; mount -o remount,bind,ro /'
    few_rights = ["setpriv", "--bounding-set", "-all,+dac_read_search", "--no-new-privs"]
    agent, connection = await join(within=[*board(script, data, scratch), *few_rights], TMPDIR=str(scratch))
    status = dict(line.split(":", 1) for line in Path(f"/proc/{agent.process.pid}/status").read_text().splitlines())
    assert int(status["CapBnd"], 16) == 1 << 2 and status["NoNewPrivs"].strip() == "1"
    mounts = [line.split() for line in Path(f"/proc/{agent.process.pid}/mounts").read_text().splitlines()]
    assert [mount[3].split(",")[0] for mount in mounts if mount[1] == "/"] == ["ro"]
    for attempt in ("a1", "a2"):
        cell = await connection.run(server.candidate("conv"), measurement=QUICK, attempt=attempt)
        assert not cell.HasField("error"), cell.error
        connection.ack(attempt)
    agent.process.terminate()
    assert await agent.ended() == 0
    assert not list(scratch.iterdir())


@pytest.mark.boards
async def test_a_bundle_of_another_architecture_is_never_started(server: Server, join: Launch) -> None:
    _, connection = await join()
    candidate = server.candidate("add")
    foreign = agent_pb2.RunnerBundle(artifact=server.put(aarch64_archive().read_bytes()))
    cell = await connection.run(agent_pb2.RunCandidate(cell_id="c", program=candidate.program, bundle=foreign))
    arch = connection.hello.devices[0].arch
    assert (cell.error.reason, cell.error.fault) == ("NO_RUNNER", common_pb2.FAULT_FARM)
    assert cell.error.message == f"The runner that arrived is for aarch64, but this device is {arch}."
    connection.start("a2", candidate, deadline_s=60)
    assert not (await connection.result("a2")).candidates[0].HasField("error")


def test_an_unsupported_backend_error_names_program_and_runner(farm: FarmProcess, tmp_path: Path) -> None:
    created = program("conv").bytes
    assert b"XnnpackBackend" in created
    (tmp_path / "other.pte").write_bytes(created.replace(b"XnnpackBackend", b"YnnpackBackend"))
    done = etfarm("bench", "other.pte", "--json", "r.json", "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 1
    (report,) = json.loads((tmp_path / "r.json").read_text())["reports"]
    error = report["error"]
    assert (error["fault"], error["reason"], error["metadata"]["missing"]) == ("USER", "BACKEND_MISSING", "YnnpackBackend")
    assert "needs the backend YnnpackBackend, which board-0" in error["message"]
    assert error["remedy"] == "It has XnnpackBackend: compile for one of them."
