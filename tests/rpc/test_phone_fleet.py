"""The fleet of phones, in this process, with a real adb server and adbd: when phones are tried, and their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.config import AgentConfig, PhoneOptions
from etfarm.device_agents.daemon.agent import Agent
from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.device_agents.daemon.phones.fleet import Fleet
from etfarm.v1 import agent_pb2, common_pb2, job_pb2
from etfarm.wire.channel import Access
from tests.support.adbd import AdbPhone
from tests.support.agent import WAIT_S, Server, server
from tests.support.farm import wait_until

__all__ = ["server"]

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="starts agents with several phones")]

NEVER_S = 1e6
"""A pause that no test outlives."""


class ReceivedUpdates:
    """Updates that the agent sends to the farm."""

    agent: Agent

    def __init__(self) -> None:
        self.messages: list[agent_pb2.AgentMessage] = []
        self._changed = asyncio.Event()

    def __call__(self, message: agent_pb2.AgentMessage) -> None:
        self.messages.append(message)
        self._changed.set()

    async def until(self, which: Callable[[agent_pb2.AgentMessage], bool], after: int = 0) -> agent_pb2.AgentMessage:
        """Return the first message after `after` others that satisfies `which`."""
        async with asyncio.timeout(WAIT_S):
            while not (result := [message for message in self.messages[after:] if which(message)]):
                self._changed.clear()
                await self._changed.wait()
        return result[0]


@asynccontextmanager
async def followed(phone: AdbPhone, server: Server, data: Path, **options: Any) -> AsyncIterator[ReceivedUpdates]:
    """A fleet that follows the phone's adb server."""
    config = AgentConfig(Access(server.address), "", data, phones=PhoneOptions(**options), gates=GateLimits(idle_wait_s=0))
    folder, received = DataFolder(data), ReceivedUpdates()
    cache = Cache(data / "cache", config.cache_limit_bytes)
    received.agent = agent = Agent(config, folder, cache, received)
    following = asyncio.create_task(Fleet(phone.server, agent, folder.agent_id(), cache, config).run())
    try:
        yield received
    finally:
        await agent.close()
        following.cancel()
        await asyncio.wait({following})
        folder.close()
    assert following.cancelled()


async def measured(received: ReceivedUpdates, candidate: agent_pb2.RunCandidate, **start: Any) -> agent_pb2.CandidateResult:
    """Return the result of a run on the served phone, which has all files from a previous run."""
    device_id = (await received.until(is_served)).device_update.device.id
    for attempt, more in {"a1": {"deadline_s": 600}, "a2": start}.items():
        received.agent.start(agent_pb2.StartRun(attempt_id=attempt, device_id=device_id, candidates=[candidate], **more))
        reported = await received.until(ends(attempt))
    return reported.run_result.candidates[0]


def is_served(message: agent_pb2.AgentMessage) -> bool:
    return message.HasField("device_update") and not message.device_update.device.HasField("problem")


def ends(attempt: str) -> Callable[[agent_pb2.AgentMessage], bool]:
    return lambda message: message.run_result.attempt_id == attempt


def tells(reason: str) -> Callable[[agent_pb2.AgentMessage], bool]:
    return lambda message: message.device_update.device.problem.reason == reason


def answer_getprop(phone: AdbPhone, script: str) -> Path:
    """Replace the phone's `getprop` by a shell script; return its file."""
    shim = phone.files / "system/bin/getprop"
    shim.write_text(f"#!/bin/sh\n{script}\n")
    shim.chmod(0o755)
    return shim


async def test_an_unusable_phone_is_reported_once_despite_retries(
    server: Server, adb_phone: AdbPhone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer_getprop(adb_phone, "echo '[ro.product.cpu.abilist]: [armeabi-v7a]'; echo tried >>/data/local/tmp/tries")
    tries = adb_phone.files / "data/local/tmp/tries"
    async with followed(adb_phone, server, tmp_path, retry_s=0.01, retry_last_s=0.02) as received:
        await received.until(tells("PHONE_UNSUPPORTED"))
        assert await asyncio.to_thread(wait_until, lambda: tries.read_text().count("tried") >= 5)
    assert caplog.text.count("runs armv7l programs only") == 1
    assert len([message for message in received.messages if message.HasField("device_update")]) == 1


@pytest.mark.remedy("PHONE_UNSUPPORTED")
async def test_an_unusable_phone_is_retried_when_it_is_plugged_in_again(
    server: Server, adb_phone: AdbPhone, tmp_path: Path
) -> None:
    shim = answer_getprop(adb_phone, "echo '[ro.product.cpu.abilist]: [armeabi-v7a]'")
    async with followed(adb_phone, server, tmp_path, retry_s=NEVER_S, retry_last_s=NEVER_S) as received:
        refused = await received.until(tells("PHONE_UNSUPPORTED"))
        shim.unlink()
        await adb_phone.disconnect()
        gone = await received.until(lambda message: message.HasField("device_gone"))
        await adb_phone.connect()
        served = await received.until(is_served)
    assert [refused.device_update.device.id, gone.device_gone.device_id] == [served.device_update.device.id] * 2


@pytest.mark.remedy("PHONE_TOO_OLD")
async def test_a_phone_without_exit_codes_is_served_once_its_android_is_newer(
    server: Server, adb_phone: AdbPhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def features(serial: str) -> set[str]:
        return {"cmd"}  # as of Android 6

    monkeypatch.setattr(adb_phone.server, "features", features)
    async with followed(adb_phone, server, tmp_path, retry_s=NEVER_S, retry_last_s=NEVER_S) as received:
        await received.until(tells("PHONE_TOO_OLD"))
        monkeypatch.undo()
        await adb_phone.disconnect()
        await received.until(lambda message: message.HasField("device_gone"))
        await adb_phone.connect()
        await received.until(is_served)


@pytest.mark.remedy("PHONE_REFUSED")
async def test_a_phone_without_its_shells_folder_is_served_once_it_has_it(
    server: Server, adb_phone: AdbPhone, tmp_path: Path
) -> None:
    folder = adb_phone.files / "data/local/tmp"
    folder.rmdir()
    folder.touch()
    async with followed(adb_phone, server, tmp_path, retry_s=NEVER_S, retry_last_s=NEVER_S) as received:
        refused = await received.until(tells("PHONE_REFUSED"))
        assert "/data/local/tmp" in refused.device_update.device.problem.remedy
        folder.unlink()
        folder.mkdir()
        await adb_phone.disconnect()
        await received.until(lambda message: message.HasField("device_gone"))
        await adb_phone.connect()
        await received.until(is_served)


async def test_a_phone_is_retried_at_once_when_its_state_changes(server: Server, adb_phone: AdbPhone, tmp_path: Path) -> None:
    adb_phone.kill_adbd()
    async with followed(adb_phone, server, tmp_path, retry_s=NEVER_S, retry_last_s=NEVER_S, settle_s=0.0) as received:
        await received.until(tells("PHONE_NOT_READY"))
        adb_phone.start_adbd()
        await received.until(is_served)  # adb itself connects to it again, after a while
        assert not [message for message in received.messages if message.HasField("device_gone")]


async def test_an_unreachable_adb_server_is_reported_once(
    server: Server, adb_phone: AdbPhone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adb_phone.kill_server()
    connecting = asyncio.Event()
    missing = adb_phone.server.start_server
    seen = 0

    async def counted() -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            connecting.set()
        await missing()

    adb_phone.server.start_server = counted  # type: ignore[method-assign]
    async with followed(adb_phone, server, tmp_path), asyncio.timeout(WAIT_S):
        await connecting.wait()
    assert caplog.text.count("No adb server answers") == 1


async def test_a_phone_with_two_connections_falls_back_to_the_second(
    server: Server, adb_phone: AdbPhone, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer_getprop(adb_phone, "echo '[ro.serialno]: [ONE]'")
    async with followed(adb_phone, server, tmp_path, retry_s=NEVER_S, retry_last_s=NEVER_S) as received:
        await received.until(is_served)
        await adb_phone.server.connect(f"localhost:{adb_phone.serial.rpartition(':')[2]}")
        assert await asyncio.to_thread(wait_until, lambda: "is connected twice" in caplog.text)
        known = len(received.messages)
        await adb_phone.disconnect()
        await received.until(is_served, known)
        reported = [each.WhichOneof("message") for each in received.messages[known:]]
        assert reported == ["device_gone", "device_update"]
        assert received.messages[-1].device_update.device.id == "ONE"


@pytest.mark.parametrize("step", ["recognized", "tried"])
async def test_a_link_that_dies_during_enrolment_is_detected_by_a_probe(
    server: Server, adb_phone: AdbPhone, tmp_path: Path, step: str
) -> None:
    reached = adb_phone.files / "data/local/tmp/reached"
    stuck = "echo reached >/data/local/tmp/reached; exec sleep 1000"
    if step == "recognized":
        answer_getprop(adb_phone, stuck)
    runner = adb_phone.files / "data/local/tmp/runner"
    runner.write_text(f"#!/bin/sh\n{stuck}\n")
    runner.chmod(0o755)
    # Far shorter than any of the steps may take.
    prompt = {"probe_s": 0.2, "answer_s": 2.0, "retry_s": NEVER_S}
    async with followed(adb_phone, server, tmp_path, runner="/data/local/tmp/runner", **prompt) as received:
        assert await asyncio.to_thread(wait_until, reached.exists)
        adb_phone.freeze_adbd()
        reported = await received.until(lambda message: message.device_update.device.HasField("problem"))
        problem = reported.device_update.device.problem
        assert (problem.reason, problem.metadata["during"]) == ("PHONE_SILENT", "asking whether it lives")
        adb_phone.thaw_adbd()


async def test_a_slow_pull_of_a_trace_is_a_link_fault(
    server: Server, adb_phone: AdbPhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = adb_phone.server.pull

    async def slowly(serial: str, remote: str, path: Path, **options: Any) -> int:
        with (adb_phone.files / remote[1:]).open("ab") as trace:
            trace.write(bytes(16 << 20))
        adb_phone.slow_link(2_560_000)
        return await pull(serial, remote, path, **options)

    monkeypatch.setattr(adb_phone.server, "pull", slowly)
    # An answer comes behind what is in the buffers.
    async with followed(adb_phone, server, tmp_path, answer_s=60.0) as received:
        measurement = job_pb2.Measurement(warmup=1, iterations=5, min_time_s=0)
        cell = await measured(received, server.candidate("conv"), measurement=measurement, deadline_s=25)
        assert (cell.error.fault, cell.error.reason) == (common_pb2.FAULT_DEVICE, "TRANSFER_TIMED_OUT")
        assert cell.error.stage == "UPLOAD"
        assert f"files that it wrote, between the agent and {adb_phone.serial}, were still in progress" in cell.error.message
        assert [phase.phase for phase in cell.phases][-2:] == ["TIMED", "TRACED"]


async def test_a_slow_pull_of_outputs_is_a_link_fault(server: Server, adb_phone: AdbPhone, tmp_path: Path) -> None:
    # An answer comes behind the outputs.
    async with followed(adb_phone, server, tmp_path, answer_s=60.0) as received:
        measurement = job_pb2.Measurement(warmup=1, min_time_s=2)
        running = asyncio.create_task(measured(received, server.candidate("wide"), measurement=measurement, deadline_s=25))
        await received.until(lambda message: message.run_progress.phase == "TIMED")
        adb_phone.slow_link(400_000)
        # After the deadline nothing has to wait for what is left in the buffers.
        asyncio.get_running_loop().call_later(25, adb_phone.slow_link, 1_000_000_000)
        cell = await running
        assert (cell.error.fault, cell.error.reason) == (common_pb2.FAULT_DEVICE, "TRANSFER_TIMED_OUT")
        assert cell.error.stage == "OUTPUTS" and "its outputs, between the agent and" in cell.error.message
