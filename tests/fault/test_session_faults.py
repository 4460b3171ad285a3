"""Faults that end a session: the caller gets the reason, the device is free, the runner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from etfarm.client import LocalSession, Session
from etfarm.v1 import artifact_pb2_grpc, compile_pb2, session_pb2, session_pb2_grpc
from etfarm.wire import digest, tensors
from etfarm.wire.channel import open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error
from tests.support.credentials import ADMIN, Credentials
from tests.support.farm import PROMPTLY_S, Daemon, FarmProcess, descendants, lives, wait_until
from tests.support.farm import runners as runners_of
from tests.support.programs import cache_folder, program
from tests.support.proxy import link_to
from tests.support.refusals import refuses
from tests.support.session_ends import Caller

pytestmark = pytest.mark.slow(reason="kills servers and agents in the middle of sessions")

ZERO = np.zeros(1, np.float32)
LONG = {"warmup": 0, "min_time_s": 30.0, "max_time_s": 30.0}
"""A loop that a fault can hit in the middle; the slow program's iterations are few enough."""

HOLDER = """
import select, signal, sys, numpy as np
from etfarm.client import Farm
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell lets its background ignore
with Farm(sys.argv[1]) as farm, farm.session(program=sys.argv[2]) as session:
    session.run("forward", np.zeros(1, np.float32))
    print("holding", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass
"""
"""A process that has a session and keeps it. A signal that arrives just before a wait without a limit would not end it."""


@pytest.fixture
def holder(farm: FarmProcess) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, farm.address, str(program("counter").path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "holding"
        yield process
    finally:
        process.kill()
        process.communicate()


def runners(agent: Daemon) -> set[int]:
    """Return the process ids of the agent's runners."""
    return runners_of(agent.pid)


def works_again(farm: FarmProcess) -> bool:
    """Return whether a new session starts with a new state."""
    with farm.client() as client, client.session(program("counter").path) as session:
        return bool(session.run("forward", ZERO)[0].item() == 1.0)


def loop_in_thread(session: Session) -> tuple[threading.Thread, list[EtfarmError]]:
    """Run a loop in a thread; yield the error that ended it."""
    errors: list[EtfarmError] = []

    def run() -> None:
        try:
            session.loop(1, **LONG)  # type: ignore[arg-type]
        except EtfarmError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_caller_that_ends_releases_the_device(farm: FarmProcess, holder: subprocess.Popen[str], number: int) -> None:
    assert not farm.is_idle()
    held = runners(farm.agents[0])
    assert held
    holder.send_signal(number)
    assert wait_until(farm.is_idle, PROMPTLY_S)
    assert wait_until(lambda: not any(lives(pid) for pid in held), PROMPTLY_S)
    assert works_again(farm)


def test_a_program_that_crashes_in_a_call_ends_the_session_with_the_same_error(farm: FarmProcess) -> None:
    with farm.client() as client, client.session(program("chain").path) as session:
        thread, errors = loop_in_thread(session)
        (runner,) = runners(farm.agents[0])
        assert wait_until(lambda: psutil.Process(runner).cpu_times().user > 0.05)
        os.kill(runner, signal.SIGSEGV)
        thread.join()
        (error,) = errors
        assert (error.fault.value, error.reason, error.metadata["signal"]) == ("USER", "PROGRAM_CRASHED", "SIGSEGV")
        assert error.metadata["self_test"] == "passed"
        assert wait_until(farm.is_idle, PROMPTLY_S)
        with refuses("PROGRAM_CRASHED"):
            session.run("forward", *[np.zeros(64, np.float32)])
    assert works_again(farm)


@pytest.mark.remedy("PROGRAM_TIMED_OUT")
def test_a_hanging_program_is_killed_at_its_calls_timeout(farm: FarmProcess) -> None:
    with farm.client() as client, client.session(program("chain").path) as session:
        session.run("forward", np.zeros(64, np.float32))
        (runner,) = runners(farm.agents[0])
        os.kill(runner, signal.SIGSTOP)
        with refuses("PROGRAM_TIMED_OUT", match=r"0\.5 s"):
            session.run("forward", np.zeros(64, np.float32), timeout_s=0.5)
        assert wait_until(farm.is_idle, PROMPTLY_S)
        assert not lives(runner)
    with farm.client() as client, client.session(program("chain").path) as session:
        (runner,) = runners(farm.agents[0])
        os.kill(runner, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (runner, signal.SIGCONT)).start()  # so it is only slow
        assert session.run("forward", np.zeros(64, np.float32), timeout_s=60)


def test_the_runner_of_a_hanging_call_is_killed_when_its_caller_leaves(farm: FarmProcess) -> None:
    with farm.client() as client, client.session(program("chain").path) as session:
        (runner,) = runners(farm.agents[0])
        os.kill(runner, signal.SIGSTOP)
        thread, errors = loop_in_thread(session)
        assert wait_until(lambda: thread.is_alive())
    assert wait_until(lambda: not lives(runner), PROMPTLY_S)
    thread.join()
    assert [error.reason for error in errors] == ["SESSION_CLOSED"]
    assert works_again(farm)


def test_a_killed_agent_ends_the_session_and_a_new_agent_serves_the_next(breakable: FarmProcess) -> None:
    breakable.start()
    with breakable.client() as client, client.session(program("counter").path) as session:
        session.run("forward", ZERO)
        held = runners(breakable.agents[0])
        breakable.agents[0].kill9()
        assert wait_until(lambda: not any(lives(pid) for pid in held), PROMPTLY_S), "the runner outlived its agent"
        with pytest.raises(EtfarmError) as lost:
            session.run("forward", ZERO)
        assert (lost.value.fault.value, lost.value.reason) == ("DEVICE", "SESSION_LOST")
    breakable.agents[0].start()
    breakable.agents[0].expect("connected to")
    assert works_again(breakable)


def test_a_broken_agent_link_ends_the_session_on_both_sides(breakable: FarmProcess) -> None:
    breakable.start(agents=0)
    with link_to(breakable.address) as link:
        agent = breakable.add_agent(server=link.address)
        with breakable.client() as client, client.session(program("counter").path) as session:
            session.run("forward", ZERO)
            assert runners(agent)
            link.cut()
            assert wait_until(lambda: not runners(agent), PROMPTLY_S), "a runner without a session"
            with refuses("SESSION_LOST"):
                session.run("forward", ZERO)
        link.heal()
        agent.expect("connected to")
        assert works_again(breakable)


def test_a_killed_server_ends_the_session_and_serves_new_ones_after_a_restart(breakable: FarmProcess) -> None:
    breakable.start()
    with breakable.client() as client, client.session(program("counter").path) as session:
        session.run("forward", ZERO)
        breakable.kill9()
        with refuses("SERVER_UNREACHABLE"):
            session.run("forward", ZERO)
    assert wait_until(lambda: not runners(breakable.agents[0]), PROMPTLY_S), "a runner without a session"
    breakable.restart()
    breakable.agents[0].expect("connected to")
    assert works_again(breakable)


@pytest.mark.remedy("SERVER_STOPPED")
def test_a_stopping_server_ends_its_sessions_with_a_reason(breakable: FarmProcess) -> None:
    breakable.start()
    assert breakable.server is not None
    with breakable.client() as client, client.session(program("counter").path) as session:
        session.run("forward", ZERO)
        breakable.server.signal(signal.SIGTERM)
        assert wait_until(lambda: not runners(breakable.agents[0]))
        with refuses("SERVER_STOPPED"):
            session.run("forward", ZERO)
    breakable.restart()
    breakable.agents[0].expect("connected to")
    assert works_again(breakable)


async def test_a_session_belongs_to_its_owner(tmp_path: Path, credentials: Credentials) -> None:
    with FarmProcess(tmp_path) as farm:
        await asyncio.to_thread(farm.start)
        async with contextlib.AsyncExitStack() as stack:
            owner, other, admin = [
                await stack.enter_async_context(open_channel(credentials.access(farm.address, name)))
                for name in ("ann", "ben", ADMIN)
            ]
            data = program("counter").bytes
            pte = artifact_of(data)
            await upload(artifact_pb2_grpc.ArtifactServiceStub(owner), pte, data)
            wanted = compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {}))
            caller = Caller(owner, session_pb2.OpenSessionRequest(program=wanted))
            await caller.event("ready")
            assert await _count(owner, caller.id) == 1.0
            assert await _count(other, caller.id) == "SESSION_NOT_FOUND"
            assert await _count(admin, caller.id) == 2.0
            assert await _count(owner, caller.id) == 3.0, "the admin's call counted, the stranger's did not"
            caller.events.cancel()


async def _count(channel: grpc.aio.Channel, session_id: str) -> float | str:
    """Return the result of a call of the session's counter, or the reason of its refusal."""
    inputs = session_pb2.SessionTensors(inline=tensors.encode([tensors.from_array("", ZERO)]))
    task = session_pb2.SessionTask(method="forward", inputs=inputs)
    request = session_pb2.CallSessionRequest(session_id=session_id, call_id=os.urandom(4).hex(), task=task)
    try:
        response = await session_pb2_grpc.SessionServiceStub(channel).Call(request)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error, server="").reason
    (output,) = tensors.decode(response.answer.outputs.inline)
    assert isinstance(output, tensors.Tensor)
    return float(tensors.to_array(output).item())


def test_a_local_session_s_processes_and_files_end_with_their_caller(tmp_path: Path) -> None:
    source = HOLDER.replace("from etfarm.client import Farm", "from etfarm.client import LocalSession").replace(
        "Farm(sys.argv[1]) as farm, farm.session(program=sys.argv[2])", "LocalSession(sys.argv[2])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, "", str(program("counter").path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "ETFARM_DATA": str(cache_folder() / "data"),
        "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "holding"
        below = descendants(process.pid)
        assert len(below) == 2  # the server of sessions and the runner
    finally:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not any(lives(pid) for pid in below), PROMPTLY_S)
    assert not list(tmp_path.glob("etfarm-local-*")), "no other process is left to delete its folder"


def test_a_crash_in_a_local_session_ends_it_with_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_DATA", str(cache_folder() / "data"))
    with LocalSession(program("chain").path) as session:
        thread, errors = loop_in_thread(session)
        result: list[int] = []

        def runner_is_busy() -> bool:
            result.clear()
            for pid in descendants(os.getpid()):
                # What others of this test run started may end meanwhile.
                with suppress(psutil.NoSuchProcess):
                    result.extend([pid] if "etfarm-runner" in " ".join(psutil.Process(pid).cmdline()) else [])
            return len(result) == 1 and psutil.Process(result[0]).cpu_times().user > 0.05

        assert wait_until(runner_is_busy)
        os.kill(result[0], signal.SIGSEGV)
        thread.join()
        assert [error.reason for error in errors] == ["PROGRAM_CRASHED"]
        with refuses("PROGRAM_CRASHED"):
            session.run("forward", np.zeros(64, np.float32))
