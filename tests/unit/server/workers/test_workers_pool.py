"""The workers: real forkserver, real children; nothing of them outlives its job or its daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from etfarm.server.workers.errors import (
    MAX_METADATA,
    MAX_TEXT,
    ChildDied,
    ChildOutOfMemory,
    ChildTimedOut,
    LoadingTimedOut,
    ParsingTimedOut,
    WorkersDown,
)
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.pool import Workers
from etfarm.wire.errors import EtfarmError, FarmError, Fault
from tests.support.farm import descendants, wait_until
from tests.support.traces import traced
from tests.support.worker_pools import worker_pool

ROOT = Path(__file__).resolve().parents[4]
TASKS = "tests.support.worker_tasks"
LIMITS = Limits(memory_bytes=256 << 20, cpu_s=60, threads=1)
TRIES = 10
"""Of what has to be quick: the machine may stand still in one of them."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ETFARM_TOKEN", "s3cret")


started = partial(worker_pool, preload=[TASKS], limits=LIMITS)
"""Starts a pool whose children know the tasks."""


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with started(tmp_path, concurrency=3) as pool:
        yield pool


async def works(pool: Workers, **options: Any) -> bool:
    """Return whether a child does a task."""
    async with await pool.run(f"{TASKS}:echo", 1, deadline_s=60, **options) as finished:
        return finished.result == b"1"


def folders(tmp_path: Path) -> list[str]:
    return [p.name for p in (tmp_path / "jobs").iterdir() if p.name.startswith("job-")]


async def gone(pids: Sequence[int], within_s: float) -> bool:
    """Wait until none of `pids` runs any more, by their pidfds; fail where one does."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within_s):
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            ended = loop.create_future()
            loop.add_reader(handle, lambda ended=ended: ended.done() or ended.set_result(None))
            try:
                await ended
            finally:
                loop.remove_reader(handle)
                os.close(handle)
    return True


def read(file: Path) -> bytes:
    """Return the file's bytes; none of a process that has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def daemon_like(folder: Path, preload: str) -> subprocess.Popen[bytes]:
    """Return a process with workers of its own, which prints its forkserver's pid, then `lingers` once a child lingers."""
    command = [sys.executable, "-m", "tests.support.daemon", str(folder), preload]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


async def test_a_result_and_its_files_come_back_and_the_folder_goes(workers: Workers, tmp_path: Path) -> None:
    events: list[bytes] = []
    async with await workers.run(f"{TASKS}:echo", {"a": (1, 2)}, deadline_s=60, on_event=events.append) as finished:
        assert finished.result == b"{'a': (1, 2)}"
        assert (finished.folder / "file.txt").read_text() == "kept"
        assert finished.peak_rss_bytes > 1 << 20
    assert events == [b'{"stage": "ONE", "phase": "START"}']
    assert not finished.folder.exists()


async def test_a_domain_error_keeps_its_fault_reason_words_stage_and_metadata(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(EtfarmError) as caught:
        await workers.run(f"{TASKS}:refuse", None, deadline_s=60)
    error = caught.value
    assert (error.fault, error.reason, error.stage) == (Fault.USER, "TOO_TALL", "MEASURE")
    assert (error.message, error.remedy, error.metadata) == ("It is 3 m tall, says x.", "Cut it.", {"height_m": "3"})
    assert not folders(tmp_path)


async def test_a_full_disk_is_the_farms_and_says_so(workers: Workers) -> None:
    with pytest.raises(FarmError, match="No space left on device") as raised:
        await workers.run(f"{TASKS}:fill", None, deadline_s=60)
    assert (raised.value.reason, raised.value.fault) == ("DISK_FULL", Fault.FARM)


async def test_an_error_of_a_child_is_cut_to_a_size_that_can_be_kept(workers: Workers) -> None:
    with pytest.raises(EtfarmError) as raised:
        await workers.run(f"{TASKS}:refuse_at_length", None, deadline_s=60)
    assert len(raised.value.message) <= MAX_TEXT + len(".")
    assert 0 < len(raised.value.metadata) <= MAX_METADATA
    assert all(len(key) <= 100 and len(value) <= MAX_TEXT for key, value in raised.value.metadata.items())


async def test_an_unforeseen_error_is_the_farms_with_its_traceback_in_the_log(workers: Workers) -> None:
    log: list[str] = []
    with pytest.raises(FarmError) as caught:
        await workers.run(f"{TASKS}:stumble", None, deadline_s=60, on_log=log.append)
    assert caught.value.reason == "INTERNAL"
    assert "an unforeseen key" in caught.value.metadata["traceback"]
    assert any("Traceback" in line for line in log)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
async def test_a_death_names_the_signal_the_stage_and_the_last_words(workers: Workers, number: int) -> None:
    with pytest.raises(ChildDied) as caught:
        await workers.run(f"{TASKS}:crash", int(number), deadline_s=60)
    assert caught.value.reason == "COMPILER_CRASHED"
    assert caught.value.fault is Fault.FARM
    assert caught.value.metadata["signal"] == signal.Signals(number).name
    assert caught.value.stage == "TO_EXECUTORCH"
    assert "last words" in caught.value.metadata["log"]


@pytest.mark.remedy("CHILD_OUT_OF_MEMORY")
async def test_more_memory_than_the_budget_is_a_clear_error_and_the_next_child_is_fine(workers: Workers) -> None:
    with pytest.raises(ChildOutOfMemory) as caught:
        await workers.run(f"{TASKS}:eat", None, deadline_s=60)
    assert caught.value.fault is Fault.USER
    assert caught.value.stage == "QUANTIZE"
    assert "256 MiB" in caught.value.message
    assert await works(workers)


@pytest.mark.remedy("CHILD_TIMED_OUT")
async def test_the_deadline_ends_a_child(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(ChildTimedOut):
        await workers.run(f"{TASKS}:spin", None, deadline_s=0.3)
    assert not folders(tmp_path)
    async with await workers.run(f"{TASKS}:echo", 1, deadline_s=60) as finished:
        assert finished.result == b"1"


@pytest.mark.slow(reason="waits for the deadlines of stages")
async def test_a_stage_s_own_clock_ends_a_child_that_hangs_in_it_and_names_it(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(ChildTimedOut, match=r"SECOND was not done after 3 s") as caught:
        await workers.run(f"{TASKS}:hang_in_the_second_stage", None, deadline_s=60, stage_deadline_s=3)
    assert (caught.value.stage, caught.value.metadata["clock"]) == ("SECOND", "stage")
    assert not folders(tmp_path)


async def test_a_child_that_never_begins_a_stage_is_ended_by_the_stage_s_clock_too(workers: Workers) -> None:
    with pytest.raises(ChildTimedOut, match="before the first stage"):
        await workers.run(f"{TASKS}:spin", None, deadline_s=60, stage_deadline_s=0.3)


@pytest.mark.slow(reason="waits for the deadlines of stages")
async def test_stages_may_take_longer_together_than_one_may(workers: Workers) -> None:
    async with await workers.run(f"{TASKS}:many_stages", 64, deadline_s=60, stage_deadline_s=3) as finished:
        assert finished.cpu_s >= 3


async def test_the_whole_deadline_holds_however_many_stages_there_are(workers: Workers) -> None:
    with pytest.raises(ChildTimedOut) as caught:
        await workers.run(f"{TASKS}:many_stages", 10_000, deadline_s=0.5, stage_deadline_s=20)
    assert caught.value.metadata["clock"] == "wall"


async def test_cpu_time_ends_a_child(tmp_path: Path) -> None:
    async with started(tmp_path, limits=Limits(cpu_s=1)) as pool:
        with pytest.raises(ChildTimedOut, match="CPU"):
            await pool.run(f"{TASKS}:spin", None, deadline_s=60)


@pytest.mark.remedy("MODEL_LOADING_TIMED_OUT")
async def test_a_model_that_takes_too_long_to_load_ends_its_child_within_native_code(workers: Workers, tmp_path: Path) -> None:
    (model := tmp_path / "model").write_bytes(b"")
    with pytest.raises(LoadingTimedOut, match="Loading the model took more CPU time") as caught:
        await workers.run(f"{TASKS}:load_for_ever", model, deadline_s=600)
    assert (caught.value.fault, caught.value.metadata["clock"]) == (Fault.USER, "loading")
    async with await workers.run(f"{TASKS}:load_in_time", model, deadline_s=600) as finished:
        assert finished.result == b"done"


@pytest.mark.remedy("TRACE_PARSING_TIMED_OUT")
async def test_parsing_that_takes_too_long_ends_its_child_within_native_code(workers: Workers, tmp_path: Path) -> None:
    (trace := tmp_path / "trace").write_bytes(b"")
    with pytest.raises(ParsingTimedOut, match="Parsing the trace") as caught:
        await workers.run(f"{TASKS}:parse_for_ever", trace, deadline_s=600)
    assert caught.value.fault is Fault.DEVICE
    written = traced("portable").etdump  # as the runner of an updated agent writes it
    async with await workers.run(f"{TASKS}:parse_trace", written, deadline_s=600) as finished:
        assert int(finished.result) > 0


async def cancelled(workers: Workers) -> float:
    """Seconds from the cancel of a run until its child and its grandchild are gone."""
    lingers: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    run = asyncio.create_task(workers.run(f"{TASKS}:linger", None, deadline_s=60, on_event=lingers.set_result))
    await lingers
    # The child knows itself and its grandchild by the ids of its own process namespace only.
    assert workers.forkserver_pid is not None
    tree = list(descendants(workers.forkserver_pid))
    assert len(tree) == 3  # the supervisor, the child, the grandchild
    began = time.monotonic()
    run.cancel()
    await gone(tree, 60)
    took_s = time.monotonic() - began
    with pytest.raises(asyncio.CancelledError):
        await run
    return took_s


async def test_cancelling_kills_the_child_and_its_grandchild_within_100_ms(workers: Workers, tmp_path: Path) -> None:
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 0.1 and len(took_s) < TRIES):
        took_s.append(await cancelled(workers))
        assert not folders(tmp_path)
    assert min(took_s) < 0.1, took_s


async def test_what_a_finished_child_left_running_is_ended(workers: Workers) -> None:
    seconds = str(600 + os.getpid() / 10_000_000)  # a command line that no other process has
    async with await workers.run(f"{TASKS}:leave_behind", seconds, deadline_s=60) as finished:
        assert finished.result == b"running"
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if seconds.encode() in read(p)]


async def test_cancelling_while_the_forkserver_warms_up_leaves_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as pool:
        run = asyncio.create_task(pool.run(f"{TASKS}:echo", None, deadline_s=60))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert not folders(tmp_path)


async def test_a_task_says_when_it_waits_for_its_turn_and_when_it_has_it(tmp_path: Path) -> None:
    async with started(tmp_path) as pool:
        lingers, turns, granted = asyncio.Event(), list[bool](), asyncio.Event()
        first = asyncio.create_task(pool.run(f"{TASKS}:linger", None, deadline_s=60, on_event=lambda _: lingers.set()))
        await asyncio.wait_for(lingers.wait(), 60)

        def on_turn(has_turn: bool) -> None:
            turns.append(has_turn)
            granted.set()

        second = asyncio.create_task(pool.run(f"{TASKS}:echo", 1, deadline_s=60, on_turn=on_turn))
        await asyncio.wait_for(granted.wait(), 60)
        assert turns == [False]
        first.cancel()
        async with await second as finished:
            assert finished.result == b"1"
        assert turns == [False, True]


async def test_output_of_python_c_and_subprocesses_is_captured(workers: Workers) -> None:
    log: list[str] = []
    async with await workers.run(f"{TASKS}:talk", None, deadline_s=60, on_log=log.append):
        pass
    assert {"from Python", "from stderr", "from C", "from a raw write", "from a subprocess"} <= set(log)


async def test_a_flood_of_output_neither_blocks_nor_breaks(workers: Workers) -> None:
    log: list[str] = []
    async with await workers.run(f"{TASKS}:flood", None, deadline_s=60, on_log=log.append) as finished:
        assert finished.result == b"done"
    assert sum(len(line) for line in log if line.startswith("x")) == 1_000_000
    assert "\N{REPLACEMENT CHARACTER}" * 2 in log


async def test_a_task_starts_again_if_its_forkserver_is_killed_while_it_warms_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    # The first forkserver hangs while it warms up, the next one does not.
    preload = f"""
import pathlib, time
first = pathlib.Path({str(first)!r})
if not first.exists():
    first.touch()
    time.sleep(600)
"""
    (tmp_path / "hangs_once.py").write_text(preload)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    async with started(tmp_path, preload=["hangs_once"]) as pool:
        run = asyncio.create_task(pool.run(f"{TASKS}:echo", 1, deadline_s=60))
        assert await asyncio.to_thread(wait_until, first.exists)
        assert pool.forkserver_pid is not None
        os.kill(pool.forkserver_pid, signal.SIGKILL)
        async with await run as finished:
            assert finished.result == b"1"


async def test_a_task_whose_supervisors_are_killed_again_and_again_fails(workers: Workers) -> None:
    lingers: asyncio.Queue[bytes] = asyncio.Queue()
    run = asyncio.create_task(workers.run(f"{TASKS}:linger", None, deadline_s=60, on_event=lingers.put_nowait))
    for _ in range(3):
        await asyncio.wait_for(lingers.get(), 60)
        assert workers.forkserver_pid is not None
        (supervisor,) = psutil.Process(workers.forkserver_pid).children()
        supervisor.kill()
    with pytest.raises(ChildDied):
        await run
    assert lingers.empty()


async def test_without_prewarm_the_first_task_starts_the_forkserver_and_warms_it_within_the_gate(tmp_path: Path) -> None:
    forkservers: list[int | None] = []

    @asynccontextmanager
    async def gate() -> AsyncIterator[None]:
        forkservers.append(pool.forkserver_pid)
        yield

    async with started(tmp_path, prewarm=False, gate=gate) as pool:
        assert pool.forkserver_pid is None
        assert await works(pool)
        warm = pool.forkserver_pid
        assert await works(pool)
    assert warm is not None
    assert forkservers == [None, warm, warm], "the warm-up, then the two tasks"
    assert pool.forkserver_pid is None


async def test_a_light_task_does_not_wait_for_the_preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_preload.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    async with started(tmp_path, preload=["slow_preload"], light_preload=[TASKS]) as pool:
        warming = pool.forkserver_pid
        assert await works(pool, light=True)
        assert warming is not None and pool.forkserver_pid == warming and psutil.pid_exists(warming)
    assert not psutil.pid_exists(warming)


async def test_a_light_task_takes_the_warm_forkserver_where_there_is_one(tmp_path: Path) -> None:
    async with started(tmp_path, light_preload=["no_such_module"]) as pool:
        await pool.ready()
        assert await works(pool, light=True)


async def test_without_a_light_preload_a_light_task_runs_as_all_others(tmp_path: Path) -> None:
    async with started(tmp_path, prewarm=False) as pool:
        assert await works(pool, light=True)
        assert pool.forkserver_pid is not None


@pytest.mark.remedy("WORKERS_DOWN")
async def test_a_preload_that_fails_says_which_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(tmp_path, preload=["no_such_module"]) as pool:
        with pytest.raises(WorkersDown, match="no_such_module"):
            await pool.ready()
    (tmp_path / "no_such_module.py").write_text("")  # now it is installed, and the server is started again
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    async with started(tmp_path, preload=["no_such_module"]) as pool:
        assert await works(pool)


@pytest.mark.parametrize("state", ["warm", "warming"])
async def test_kill_9_of_the_daemon_takes_forkserver_children_and_grandchildren(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warming = state == "warming"
    (tmp_path / "slow_preload.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    daemon = daemon_like(tmp_path / "jobs", "slow_preload" if warming else TASKS)
    assert daemon.stdout is not None
    pids = json.loads(daemon.stdout.readline())["pids"]
    if not warming:
        assert daemon.stdout.readline() == b"lingers\n"
        pids += descendants(daemon.pid)
        assert len(pids) >= 4
    daemon.kill()
    daemon.wait()
    await gone(pids, 60)


async def test_a_child_sees_no_secret_and_lives_in_its_folder(workers: Workers) -> None:
    async with await workers.run(f"{TASKS}:look_around", None, deadline_s=60) as finished:
        seen: dict[str, str] = json.loads(finished.result)
    assert "s3cret" not in seen["environment"] + seen["forkserver_environment"]
    assert seen["cwd"] == seen["folder"] == json.loads(seen["environment"])["HOME"]
