"""Programs whose kernels misbehave on the real runner: named rightly, the device free within a second, nothing left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.runners import child
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from tests.support.attempts import Board, new_attempt
from tests.support.farm import descendants, wait_until
from tests.support.faults import faulty_archive, faulty_program
from tests.support.programs import program
from tests.support.runner import quickest

FREE_S = 1.0
"""Within which the device is free again: its runner gone, and whose fault it was found out."""
WAIT_S = 60.0
BUDGET_BYTES = 200 << 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """The runner is fetched and unpacked once."""
    return Cache(tmp_path_factory.mktemp("cache"), 1 << 30)


class Struck:
    """An attempt over a program whose kernel misbehaves in the timed pass."""

    def __init__(self, board: Board, cache: Cache, fault: str, deadline_s: float = 60.0) -> None:
        blobs, self.folder = board.blobs, board.folder / "run"
        self.progress: list[agent_pb2.RunProgress] = []
        self.timed = asyncio.Event()
        self.on_loading: Callable[[], object] = lambda: None
        """Called once the runner has begun, and before it ends."""
        self.freed_s = 0.0
        """From the timed pass's begin on."""
        candidate = blobs.candidate(
            "add", threads=1, bundle=agent_pb2.RunnerBundle(artifact=blobs.put(faulty_archive().read_bytes()))
        )
        candidate.program.CopyFrom(blobs.program(faulty_program(fault) if fault else program("add").bytes))
        measurement = job_pb2.Measurement(warmup=1, iterations=100, min_time_s=0)
        start = agent_pb2.StartRun(
            attempt_id="a", device_id="d", deadline_s=deadline_s, measurement=measurement, candidates=[candidate]
        )
        share = BUDGET_BYTES / psutil.virtual_memory().available
        self._attempt = new_attempt(board, start, self._on_progress, cache=cache, memory_share=share)

    def _on_progress(self, text: agent_pb2.RunProgress) -> None:
        self.progress.append(text)
        if text.phase == "TIMED":
            self.timed.set()
        if text.phase == "LOAD_METHOD":
            self.on_loading()

    async def result(self) -> agent_pb2.CandidateResult:
        """Return what came of it, and that nothing is left."""
        before = descendants(psutil.Process().pid)
        running = asyncio.create_task(self._attempt.run())
        async with asyncio.timeout(WAIT_S):
            await self.timed.wait()
        began_s = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            (result,) = (await running).candidates
        self.freed_s = time.monotonic() - began_s
        assert not self.folder.exists()
        assert await asyncio.to_thread(wait_until, lambda: descendants(psutil.Process().pid) <= before, 10.0)
        return result


Strike = Callable[..., Struck]


@pytest.fixture
def strike(board: Board, cache: Cache) -> Strike:
    """Makes attempts over a program with a fault."""
    return partial(Struck, board, cache)


async def freed(strike: Callable[[], Struck], within_s: float = FREE_S) -> agent_pb2.CandidateResult:
    """Return what came of it, and that the device was free so soon after the timed pass began."""
    results: list[agent_pb2.CandidateResult] = []

    async def freed_s() -> float:
        struck = strike()
        results.append(await struck.result())
        return struck.freed_s

    assert await quickest(freed_s, within_s) < within_s
    return results[-1]


@pytest.mark.remedy("PROGRAM_CRASHED")
@pytest.mark.parametrize(("fault", "reason", "ended"), [
    ("abt", "PROGRAM_CRASHED", {"signal": "SIGABRT"}),
    ("fpe", "PROGRAM_CRASHED", {"signal": "SIGFPE"}),
    ("seg", "PROGRAM_CRASHED", {"signal": "SIGSEGV"}),
    ("bye", "PROGRAM_CRASHED", {"signal": "", "exit_code": "3"}),
    ("kil", "PROGRAM_CRASHED", {"signal": "SIGKILL"}),
    ("mem", "PROGRAM_OUT_OF_MEMORY", {}),
])  # fmt: skip
async def test_what_ends_the_runner_is_named_as_what_it_was(
    strike: Strike, fault: str, reason: str, ended: dict[str, str]
) -> None:
    error = (await freed(lambda: strike(fault))).error
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_USER, reason, "TIMED")
    assert error.metadata["self_test"] == "passed"
    assert {key: error.metadata[key] for key in ended} == ended
    assert error.remedy
    assert not (await strike("").result()).HasField("error"), "without the custom kernel"


@pytest.mark.parametrize(
    ("before", "after", "reason", "says"),
    [
        ("oom_kill 3", "oom_kill 3", "PROGRAM_CRASHED", "by SIGKILL at TIMED, and the kernel killed nothing for lack of memory."),
        ("oom_kill 3", "oom_kill 4", "PROGRAM_OUT_OF_MEMORY", "than this device has: the kernel killed it (SIGKILL)."),
        ("nr_free_pages 3", "nr_free_pages 2", "PROGRAM_OUT_OF_MEMORY", "it was killed (SIGKILL), as systems do then."),
    ],
)
async def test_a_killed_child_lacked_memory_if_the_kernel_reports_it(
    strike: Strike, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, reason: str, says: str
) -> None:
    vmstat = tmp_path / "vmstat"
    monkeypatch.setattr(child, "VMSTAT", vmstat)
    vmstat.write_text(f"pgfault 7\n{before}\n")
    struck = strike("kil")
    struck.on_loading = lambda: vmstat.write_text(f"pgfault 8\n{after}\n")
    error = (await struck.result()).error
    assert (error.reason, error.metadata["signal"], error.metadata["self_test"]) == (reason, "SIGKILL", "passed")
    assert says in error.message and error.remedy


def test_this_kernel_reports_how_often_memory_ran_out() -> None:
    kills = child.oom_kills()
    assert kills is not None and kills >= 0


@pytest.mark.slow(reason="waits for the deadline of a program that hangs")
async def test_a_kernel_that_never_returns_ends_with_the_attempts_time(strike: Strike) -> None:
    deadline_s = 6.0
    error = (await freed(lambda: strike("hng", deadline_s), deadline_s + FREE_S)).error
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_USER, "PROGRAM_TIMED_OUT", "TIMED")
    assert error.metadata["self_test"] == "passed"
    assert "--timeout (timeout_s=)" in error.remedy


async def test_garbage_on_stdout_is_no_answer_and_changes_none(strike: Strike) -> None:
    struck = strike("prt")
    result = await struck.result()
    assert not result.HasField("error"), result.error
    assert (result.iterations, result.stop_reason, result.repeatability.outcome) == (
        100,
        common_pb2.STOP_REASON_ENOUGH,
        report_pb2.REPEATABILITY_OUTCOME_EQUAL,
    )
    lines = [line for text in struck.progress for line in text.log_lines]
    assert any(line.startswith("garbage") for line in lines), "it is in the log, where people look for it"


async def test_a_crash_frees_the_device_for_the_next_run(strike: Strike, board: Board) -> None:
    struck = strike("abt")
    start = struck._attempt.start
    start.candidates.add().CopyFrom(start.candidates[0])
    start.candidates[1].cell_id = "second"
    start.candidates[1].program.CopyFrom(board.blobs.program(program("add").bytes))
    crashed, fine = (await struck._attempt.run()).candidates
    assert crashed.error.metadata["signal"] == "SIGABRT"
    assert not fine.HasField("error") and fine.iterations == 100
    assert not struck.folder.exists()
