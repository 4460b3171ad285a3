"""`etfarm agent --adb` as a real process, against a phone of the real adbd: runs, files, faults and reconnections."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from etfarm.device_agents.adb import AdbRefused
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.v1 import agent_pb2, common_pb2, job_pb2
from etfarm.wire import digest, tensors
from etfarm.wire.bundles import MANIFEST_NAME
from tests.support.adbd import AdbPhone, adb_phone, running_phone
from tests.support.agent import LONG, WAIT_S, Connection, Launch, Server, join, launch, server
from tests.support.farm import wait_until
from tests.support.programs import program
from tests.support.runner import close, runner_archive

__all__ = ["adb_phone", "join", "launch", "server"]

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="starts an agent and a phone for each test")]

ROOT = "data/local/tmp/etfarm"
SHORT = job_pb2.Measurement(warmup=1, iterations=5, min_time_s=0)


async def attached(join: Launch, phone: AdbPhone, *arguments: str) -> tuple[Connection, agent_pb2.AgentMessage]:
    """Return an agent that serves the phone, and its announcement of it."""
    _, connection = await join("--adb", *arguments, ADB_SERVER_SOCKET=phone.server.address)
    if connection.hello.devices:
        return connection, agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=connection.hello.devices[0]))
    return connection, await connection.until(lambda m: m.HasField("device_update"))


async def ready(join: Launch, phone: AdbPhone, *arguments: str) -> tuple[Connection, str]:
    """Return a connection, and the id of the device that the phone is on it."""
    connection, reported = await attached(join, phone, *arguments)
    assert not reported.device_update.device.HasField("problem"), reported
    return connection, reported.device_update.device.id


async def sending(server: Server) -> None:
    """Wait until an agent tries to send files to the unreachable server."""
    async with asyncio.timeout(WAIT_S):
        await server.turned_away.wait()


async def unplugged_while_it_sends(server: Server, join: Launch, phone: AdbPhone) -> tuple[Connection, str]:
    """As `ready`, with the run a1 on the phone, which is unplugged when all files are here and wait for the server."""
    connection, device_id = await ready(join, phone)
    candidate = server.candidate("conv")
    server.away = True
    connection.start("a1", candidate, measurement=SHORT, deadline_s=600, device_id=device_id)
    await sending(server)
    await phone.disconnect()
    return connection, device_id


def is_lost_before_its_result(connection: Connection, device_id: str) -> bool:
    """Whether the farm learned that no run can be placed on the device before it received the result of the first one."""
    for message in connection.received:
        if message.HasField("run_result"):
            return False
        update = message.device_update.device
        if message.device_gone.device_id == device_id or (update.id == device_id and update.HasField("problem")):
            return True
    return False


def outputs_of(server: Server, cell: agent_pb2.CandidateResult) -> list[tensors.Value]:
    return tensors.decode(server.blobs[cell.outputs.digest])


async def test_a_phone_measures_as_a_device(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone, "--label", "desk=2", "--name", "lab")
    assert device_id == adb_phone.serial
    cell = await connection.run(server.candidate("conv"), measurement=SHORT, device_id=device_id)
    assert not cell.HasField("error"), cell.error
    assert close(outputs_of(server, cell), program("conv").expected)
    assert (cell.runner.kind, cell.iterations, cell.outputs_equal) == (common_pb2.RUNNER_KIND_NATIVE, 5, True)
    assert cell.etdump.size_bytes > 100 and cell.memory.peak_rss_bytes > 1 << 20
    # From the phone to the agent, and from there to the farm.
    assert [phase.phase for phase in cell.phases][-4:] == ["TIMED", "TRACED", "UPLOAD", "UPLOAD"]
    assert cell.telemetry.before.memory_available_bytes > 0 and cell.telemetry.after.elapsed_ms > 0
    assert not cell.telemetry.after.HasField("cpu_busy_ns")
    assert list((adb_phone.files / ROOT / "runs").iterdir()) == []
    beat = await connection.until(lambda m: device_id in m.heartbeat.telemetry)
    assert beat.heartbeat.telemetry[device_id].memory_available_bytes > 0


async def test_files_on_the_phone_are_only_sent_again_if_damaged(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone)
    stored = adb_phone.files / ROOT
    for attempt in ("a1", "a2", "a3"):
        before = _written(stored)
        cell = await connection.run(server.candidate("conv"), device_id=device_id, attempt=attempt)
        assert not cell.HasField("error"), cell.error
        connection.ack(attempt)
        if attempt == "a2":
            assert _written(stored) == before
            (damaged,) = (stored / "files").iterdir()
            data = damaged.read_bytes()
            damaged.write_bytes(b"x" + data[1:])
    assert damaged.read_bytes() == data
    assert len(list((stored / "bundles").iterdir())) == 1


@pytest.mark.remedy("PHONE_STORAGE_DAMAGED")
async def test_a_phone_that_loses_what_is_written_is_named_and_runs_once_it_keeps_it(
    server: Server, join: Launch, adb_phone: AdbPhone
) -> None:
    connection, device_id = await ready(join, adb_phone)
    shim = adb_phone.files / "system/bin/sha256sum"
    kept = shim.rename(shim.with_name("kept")) if shim.exists() else None
    shim.write_text('#!/bin/sh\nfor file; do echo "$(printf %064d 0)  $file"; done\n')
    shim.chmod(0o755)
    connection.start("a1", server.candidate("conv"), deadline_s=60, device_id=device_id)
    result = await connection.result("a1")
    assert "PHONE_STORAGE_DAMAGED" in (result.error.reason, *(cell.error.reason for cell in result.candidates))
    shim.unlink() if kept is None else kept.rename(shim)
    connection.start("a2", server.candidate("conv"), deadline_s=60, device_id=device_id)
    assert not (await connection.result("a2")).candidates[0].HasField("error")


def _written(folder: Path) -> dict[str, int]:
    """Inodes and contents change when a file is written; times do with each use."""
    return {
        str(path.relative_to(folder)): path.stat().st_ino for name in ("bundles", "files") for path in (folder / name).rglob("*")
    }


async def test_a_crash_is_a_program_fault_that_names_its_signal(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone)
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=90, device_id=device_id)
    await connection.phase("TIMED")
    adb_phone.call("pkill", "-SEGV", "-f", "library-path.*etfarm-runner")
    (cell,) = (await connection.result("a1")).candidates
    assert (cell.error.reason, cell.error.metadata["signal"]) == ("PROGRAM_CRASHED", "SIGSEGV")
    assert cell.error.metadata["self_test"] == "passed"
    connection.start("a2", server.candidate("add"), deadline_s=60, device_id=device_id)
    assert not (await connection.result("a2")).candidates[0].HasField("error")


async def test_the_runner_on_a_phone_confines_itself(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone, "--require-jail")
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=90, device_id=device_id)
    await connection.phase("TIMED")
    (runner,) = adb_phone.call("pgrep", "-f", "library-path.*etfarm-runner").split()
    status = dict(line.split(":\t") for line in adb_phone.call("cat", f"/proc/{runner}/status").splitlines() if ":\t" in line)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    connection.cancel("a1")
    await connection.result("a1")


async def test_a_cancelled_run_leaves_nothing_on_the_phone(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone)
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=90, device_id=device_id)
    await connection.phase("TIMED")
    connection.cancel("a1")
    assert (await connection.result("a1")).error.reason == "CANCELLED"
    assert "etfarm-runner" not in adb_phone.call("ps", "-ef")
    assert list((adb_phone.files / ROOT / "runs").iterdir()) == []


@pytest.mark.remedy("DEVICE_GONE")
async def test_a_phone_that_is_unplugged_fails_its_run_and_comes_back(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone)
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=90, device_id=device_id)
    await connection.phase("TIMED")
    await adb_phone.disconnect()
    result = await connection.result("a1")
    assert common_pb2.FAULT_DEVICE in (result.error.fault, result.candidates[0].error.fault)
    await connection.until(lambda m: m.device_gone.device_id == device_id)
    assert is_lost_before_its_result(connection, device_id)
    known = len(connection.received)
    await adb_phone.connect()
    again = await connection.until(lambda m: m.device_update.device.id == device_id, known)
    assert not again.device_update.device.HasField("problem")  # though adb calls it offline while it shakes hands
    connection.start("a2", server.candidate("conv"), measurement=SHORT, deadline_s=60, device_id=device_id)
    assert not (await connection.result("a2")).candidates[0].HasField("error")


async def test_a_phone_unplugged_after_its_files_were_pulled_loses_no_run(
    server: Server, join: Launch, adb_phone: AdbPhone
) -> None:
    connection, device_id = await unplugged_while_it_sends(server, join, adb_phone)
    reported = await connection.until(lambda m: m.device_update.device.HasField("problem"))
    assert (reported.device_update.device.id, reported.device_update.device.problem.reason) == (device_id, "DEVICE_GONE")
    # To be in adb's list again is no reason to end what is still sent.
    await adb_phone.connect()
    await adb_phone.disconnect()
    server.away = False
    result = await connection.result("a1")
    assert not result.HasField("error") and not result.candidates[0].HasField("error"), result
    assert close(outputs_of(server, result.candidates[0]), program("conv").expected)
    assert result.candidates[0].etdump.digest in server.blobs
    gone = await connection.until(lambda m: m.device_gone.device_id == device_id)
    kinds = [message.WhichOneof("message") for message in connection.received]
    assert kinds.index("run_result") < kinds.index("device_gone") == connection.received.index(gone)


async def test_a_phone_that_is_slow_to_end_does_not_delay_another(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, _ = await unplugged_while_it_sends(server, join, adb_phone)
    async with running_phone(beside=adb_phone) as other:
        reported = await connection.until(lambda m: m.device_update.device.id == other.serial)
        assert not reported.device_update.device.HasField("problem")
        assert not [message for message in connection.received if message.HasField("run_result")]
        connection.start("a2", server.candidate("conv"), measurement=SHORT, deadline_s=600, device_id=other.serial)
        server.away = False
        for attempt in ("a1", "a2"):
            result = await connection.result(attempt)
            assert not result.HasField("error") and not result.candidates[0].HasField("error"), result


async def test_unplugging_a_phone_before_its_candidate_starts_fails_the_run(
    server: Server, join: Launch, adb_phone: AdbPhone
) -> None:
    connection, device_id = await ready(join, adb_phone)
    candidates = server.candidate("conv", "c1"), server.candidate("add", "c2")
    server.away = True
    connection.start("a1", *candidates, measurement=SHORT, deadline_s=600, device_id=device_id)
    await sending(server)
    await adb_phone.disconnect()
    # By which the farm places it again.
    result = await connection.result("a1")
    assert (result.error.fault, result.error.reason) == (common_pb2.FAULT_DEVICE, "DEVICE_GONE")
    assert is_lost_before_its_result(connection, device_id)


@pytest.mark.remedy("PHONE_SILENT")
async def test_a_dead_link_is_detected_even_if_adb_does_not(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone)
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=90, device_id=device_id)
    await connection.phase("TIMED")
    adb_phone.freeze_adbd()
    await connection.until(lambda m: m.device_update.device.problem.reason == "PHONE_SILENT")
    result = await connection.result("a1")
    assert (result.error.fault, result.error.reason) == (common_pb2.FAULT_DEVICE, "DEVICE_GONE")
    assert is_lost_before_its_result(connection, device_id)
    known = len(connection.received)
    adb_phone.thaw_adbd()
    await connection.until(
        lambda m: m.device_update.device.id == device_id and not m.device_update.device.HasField("problem"), known
    )


@pytest.mark.remedy("PHONE_TAKEN")
async def test_a_phone_is_exclusive_until_its_agent_is_killed(
    server: Server, launch: Launch, adb_phone: AdbPhone, tmp_path: Path
) -> None:
    first = await launch("--adb", ADB_SERVER_SOCKET=adb_phone.server.address)
    connection, device_id = await server.connected(), adb_phone.serial
    assert await asyncio.to_thread(wait_until, lambda: "serving the phone" in first.log)
    other = await launch("--adb", data=tmp_path / "other", ADB_SERVER_SOCKET=adb_phone.server.address)
    await server.connected()
    assert await asyncio.to_thread(wait_until, lambda: "is served by another agent (agent " in other.log)
    connection.start("a1", server.candidate("conv"), measurement=SHORT, deadline_s=60, device_id=device_id)
    assert not (await connection.result("a1")).candidates[0].HasField("error")
    first.process.kill()
    assert await asyncio.to_thread(wait_until, lambda: "serving the phone" in other.log)


@pytest.mark.remedy("PHONE_LISTED_TWICE")
async def test_a_phone_that_adb_lists_twice_is_a_single_device(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    shim = adb_phone.files / "system/bin/getprop"
    shim.write_text("#!/bin/sh\necho '[ro.serialno]: [ONE]'\n")
    shim.chmod(0o755)
    agent, connection = await join("--adb", ADB_SERVER_SOCKET=adb_phone.server.address)
    assert await asyncio.to_thread(wait_until, lambda: "as ONE (ONE)" in agent.log)
    twin = f"localhost:{adb_phone.serial.rpartition(':')[2]}"
    await adb_phone.server.connect(twin)
    assert await asyncio.to_thread(wait_until, lambda: "is connected twice" in agent.log)
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=90, device_id="ONE")
    await connection.phase("TIMED")
    await adb_phone.server.disconnect(twin)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await connection.result("a1")
    assert not [message for message in connection.received if message.HasField("device_gone")]
    connection.cancel("a1")
    assert (await connection.result("a1")).error.reason == "CANCELLED"


async def test_the_cache_on_the_phone_is_bounded(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone, "--phone-limit", "1")
    files = adb_phone.files / ROOT / "files"
    for attempt, name in (("a1", "conv"), ("a2", "add")):
        connection.start(attempt, server.candidate(name), deadline_s=60, device_id=device_id)
        assert not (await connection.result(attempt)).candidates[0].HasField("error")
        connection.ack(attempt)
        assert [path.name for path in files.iterdir()] == [server.candidate(name).program.pte.digest]
    assert len(list((adb_phone.files / ROOT / "bundles").iterdir())) == 1


async def test_a_custom_runner_replaces_the_bundles_runner(
    server: Server, join: Launch, adb_phone: AdbPhone, runner_bundle: Bundle
) -> None:
    there = adb_phone.files / "data/local/tmp/mine"
    shutil.copytree(runner_bundle.folder, there)
    command = " ".join(Bundle(Path("/data/local/tmp/mine"), runner_bundle.manifest).command())
    connection, reported = await attached(join, adb_phone, "--phone-runner", command)
    device = reported.device_update.device
    (own,) = device.own_runners
    assert own.kind == common_pb2.RUNNER_KIND_OWN and "XnnpackBackend" in own.backends and len(own.operators) > 200
    cell = await connection.run(server.candidate("conv"), device_id=device.id)
    assert not cell.HasField("error"), cell.error
    assert (cell.runner.kind, cell.runner.bundle_digest) == (common_pb2.RUNNER_KIND_OWN, "")
    assert not list((adb_phone.files / ROOT / "bundles").iterdir())


@pytest.mark.remedy("PHONE_RUNNER_UNUSABLE")
async def test_a_missing_custom_runner_is_reported_and_used_once_it_is_there(
    join: Launch, adb_phone: AdbPhone, runner_bundle: Bundle
) -> None:
    command = " ".join(Bundle(Path("/data/local/tmp/mine"), runner_bundle.manifest).command())
    connection, reported = await attached(join, adb_phone, "--phone-runner", command)
    problem = reported.device_update.device.problem
    assert problem.reason == "PHONE_RUNNER_UNUSABLE" and "adb push" in problem.remedy
    shutil.copytree(runner_bundle.folder, adb_phone.files / "data/local/tmp/mine")
    await adb_phone.disconnect()
    await adb_phone.connect()
    await connection.until(lambda m: bool(m.device_update.device.own_runners))


async def test_a_full_phone_is_reported(server: Server, join: Launch, adb_phone: AdbPhone) -> None:
    adb_phone.add_storage("/" + ROOT, 2 << 20)
    connection, device_id = await ready(join, adb_phone)
    cell = await connection.run(server.candidate("conv"), device_id=device_id)
    assert (cell.error.fault, cell.error.reason) == (common_pb2.FAULT_DEVICE, "DEVICE_DISK_FULL")
    assert "df -h /data" in cell.error.remedy


@pytest.mark.remedy("PHONE_NOT_READY")
async def test_an_unauthorized_phone_is_listed_with_a_remedy_and_served_once_authorized(
    join: Launch, adb_phone: AdbPhone
) -> None:
    await adb_phone.disconnect()
    serial = adb_phone.lock()
    with pytest.raises(AdbRefused):
        await adb_phone.server.connect(serial)
    connection, reported = await attached(join, adb_phone)
    device = reported.device_update.device
    assert (device.id, device.problem.reason, device.problem.metadata["state"]) == (serial, "PHONE_NOT_READY", "unauthorized")
    assert "has not allowed this machine to debug it" in device.problem.message
    assert "allow USB debugging for this machine in the dialog" in device.problem.remedy
    adb_phone.allow()
    await connection.until(lambda m: m.device_update.device.id == serial and not m.device_update.device.HasField("problem"))


async def test_a_32_bit_phone_is_listed_with_the_reason(join: Launch, adb_phone: AdbPhone) -> None:
    shim = adb_phone.files / "system/bin/getprop"
    shim.write_text("#!/bin/sh\necho '[ro.product.cpu.abilist]: [armeabi-v7a,armeabi]'\necho '[ro.serialno]: [OLD32]'\n")
    shim.chmod(0o755)
    _, reported = await attached(join, adb_phone)
    device = reported.device_update.device
    assert (device.id, device.arch, device.problem.reason) == ("OLD32", "armv7l", "PHONE_UNSUPPORTED")
    assert "runs armv7l programs only" in device.problem.message and "arm64-v8a" in device.problem.remedy


async def test_a_phone_that_cannot_execute_files_reports_the_systems_error(
    server: Server, join: Launch, adb_phone: AdbPhone
) -> None:
    adb_phone.call("mkdir", "-p", "/" + ROOT)
    adb_phone.call("mount", "-t", "tmpfs", "-o", "noexec", "storage", "/" + ROOT)
    connection, device_id = await ready(join, adb_phone)
    cell = await connection.run(server.candidate("conv"), device_id=device_id)
    assert (cell.error.fault, cell.error.reason) == (common_pb2.FAULT_DEVICE, "DEVICE_RUNNER_UNUSABLE")
    assert "exit code 126" in cell.error.message and "Permission denied" in cell.error.message


async def test_a_runner_killed_by_a_syscall_filter_is_reported_with_the_signal(
    server: Server, join: Launch, adb_phone: AdbPhone
) -> None:
    candidate = server.candidate("conv")
    killed = b"#!/bin/sh\nkill -SYS $$\n"
    candidate.bundle.artifact.CopyFrom(server.put(_with_loader(runner_archive(), killed)))
    connection, device_id = await ready(join, adb_phone)
    cell = await connection.run(candidate, device_id=device_id)
    assert cell.error.reason == "DEVICE_RUNNER_UNUSABLE" and "by SIGSYS" in cell.error.message


def _with_loader(archive: Path, loader: bytes) -> bytes:
    """Return a copy of the bundle with another loader."""
    changed = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=changed, mode="w:gz") as new:
        files = {member.name: (member.mode, old.extractfile(member).read()) for member in old}  # type: ignore[union-attr]
        manifest = json.loads(files[MANIFEST_NAME][1])
        name = manifest["loader"]
        manifest["files"][name] = {"digest": digest.of_bytes(loader), "size": len(loader)}
        files[name] = (0o755, loader)
        files[MANIFEST_NAME] = (0o644, json.dumps(manifest).encode())
        for name, (mode, data) in files.items():
            info = tarfile.TarInfo(name)
            info.mode, info.size = mode, len(data)
            new.addfile(info, io.BytesIO(data))
    return changed.getvalue()


async def test_without_an_adb_server_the_error_has_a_remedy(launch: Launch, tmp_path: Path) -> None:
    agent = await launch("--adb", ADB_SERVER_SOCKET=f"localfilesystem:{tmp_path / 'nobody'}")
    assert await agent.ended() == 1
    assert "No adb server answers" in agent.log and "adb start-server" in agent.log


async def test_an_agent_survives_a_restart_of_the_adb_server(join: Launch, adb_phone: AdbPhone) -> None:
    connection, device_id = await ready(join, adb_phone)
    adb_phone.kill_server()
    await connection.until(lambda m: m.device_gone.device_id == device_id)
    known = len(connection.received)
    adb_phone.start_server()
    await adb_phone.connect()
    back = await connection.until(lambda m: m.device_update.device.id == device_id, known)
    assert not back.device_update.device.HasField("problem"), back
