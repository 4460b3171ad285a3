"""Repeated runs on the real runner: fresh processes, one result; a crash or a cancellation between them."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.attempts.attempt import Attempt, Execution
from etfarm.device_agents.attempts.passes import Passes, plan_of, planned_s
from etfarm.device_agents.attempts.repeats import MAX_POINTS, add_run, join_series, run_of
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from tests.support.attempts import Board, new_attempt, no_runner_is_left

QUICK = job_pb2.Measurement(repeat=3, warmup=1, iterations=20, min_time_s=0)
NO_WAIT = GateLimits(idle_wait_s=0, cool_wait_s=0)


def prepare(
    board: Board,
    on_progress: Callable[[agent_pb2.RunProgress], None],
    name: str = "add",
    gates: GateLimits = NO_WAIT,
) -> Attempt:
    candidates = [board.blobs.candidate(name, threads=1)]
    start = agent_pb2.StartRun(attempt_id="a", device_id="d", deadline_s=200, measurement=QUICK, candidates=candidates)
    return new_attempt(board, start, on_progress, gates=gates)


async def test_each_run_is_a_process_of_its_own_and_their_samples_are_one_series(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    load = Execution.load

    async def note(self: Execution, runner: RemoteRunner, *args: Any, **more: Any) -> str:
        pids.append(runner.pid)
        return await load(self, runner, *args, **more)

    monkeypatch.setattr(Execution, "load", note)
    progress: list[agent_pb2.RunProgress] = []
    (result,) = (await prepare(board, progress.append).run()).candidates
    assert not result.HasField("error"), result.error
    assert len(set(pids)) == 3 and await no_runner_is_left()
    assert [run.iterations for run in result.runs] == [20, 20, 20] and result.iterations == 60
    assert result.samples.size_bytes == 8 * 60 and result.duration_ns == sum(run.duration_ns for run in result.runs)
    assert result.warmup == sum(run.warmup for run in result.runs) == 3
    for run in result.runs:
        assert run.load.load_ns and run.load.load_method_ns and run.load.first_run_ns and run.telemetry.wall_time_ns
        assert run.stop_reason == common_pb2.STOP_REASON_ENOUGH
    assert result.load == result.runs[0].load
    assert result.telemetry.wall_time_ns == sum(run.telemetry.wall_time_ns for run in result.runs)
    assert result.telemetry.before == result.runs[0].telemetry.before
    assert result.telemetry.after.elapsed_ms > result.runs[2].telemetry.after.elapsed_ms, "from the first timed pass"
    assert result.traced_telemetry.wall_time_ns >= sum(result.traced_ns) and result.traced_telemetry.cpu_time_ns
    assert len(result.traced_ns) and result.etdump.size_bytes and result.outputs.size_bytes and result.outputs_equal
    assert [phase.phase for phase in result.phases] == [
        "FETCH", "LOAD", "LOAD_METHOD", *["WARMUP", "TIMED"] * 3, "TRACED", "UPLOAD",
    ]  # fmt: skip
    steps = list(dict.fromkeys(each.message for each in progress))
    assert steps == ["", "run 1 of 3", "run 2 of 3", "run 3 of 3"]


async def test_a_crash_in_the_second_run_fails_the_candidate(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, calls = Passes.measure, 0

    async def crash(self: Passes, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            assert isinstance(self._runner, RemoteRunner)
            os.kill(self._runner.pid, signal.SIGSEGV)
        return await measure(self, *args)

    monkeypatch.setattr(Passes, "measure", crash)
    (result,) = (await prepare(board, lambda progress: None).run()).candidates
    assert result.error.reason == "PROGRAM_CRASHED" and len(result.runs) == 1
    assert not result.HasField("samples") and await no_runner_is_left()


@pytest.mark.slow(reason="waits for the deadline of a program that hangs")
async def test_a_program_that_hangs_while_it_is_loaded_for_the_second_run_is_named(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, calls = Execution.load, 0

    async def hang(self: Execution, runner: RemoteRunner, *args: Any, **more: Any) -> str:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(runner.pid, signal.SIGSTOP)
        return await load(self, runner, *args, **more)

    monkeypatch.setattr(Execution, "load", hang)
    reported: list[agent_pb2.RunProgress] = []
    busy = GateLimits(idle_below=0, idle_wait_s=0.2, cool_wait_s=0)  # each run waits in vain for an idle device
    attempt = prepare(board, reported.append, gates=busy)
    attempt.start.deadline_s = 8
    (result,) = (await attempt.run()).candidates
    assert calls == 2 and reported[-1].message == "run 2 of 3"
    assert "WAIT_FOR_IDLE" in {phase.phase for phase in result.phases}
    assert result.error.reason == "PROGRAM_TIMED_OUT" and await no_runner_is_left()


async def test_a_cancellation_between_runs_leaves_no_process(board: Board) -> None:
    second = asyncio.Event()

    def watch(progress: agent_pb2.RunProgress) -> None:
        if progress.message.startswith("run 2"):
            second.set()

    running = asyncio.create_task(prepare(board, watch).run())
    await asyncio.wait_for(second.wait(), 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await no_runner_is_left() and not (board.folder / "run").exists()


def test_all_runs_share_the_default_limit_of_samples() -> None:
    assert plan_of(job_pb2.Measurement(repeat=5)).max_samples == 200_000
    assert plan_of(job_pb2.Measurement(repeat=5, max_samples=7)).max_samples == 7


@given(st.lists(st.integers(0, MAX_POINTS), min_size=2, max_size=50))
def test_the_series_of_all_runs_is_bounded_and_ordered(points: list[int]) -> None:
    def part(count: int) -> agent_pb2.CandidateResult:
        series = [report_pb2.TelemetryPoint(elapsed_ms=place) for place in range(count)]
        return agent_pb2.CandidateResult(telemetry=report_pb2.RunTelemetry(series=series, cpu_time_ns=1))

    result = part(points[0])
    result.runs.append(run_of(result))
    begins_ms = [number * 1000.0 for number in range(len(points))]
    for begin_ms, count in zip(begins_ms[1:], points[1:], strict=True):
        add_run(result, part(count), begin_ms)
    join_series(result, begins_ms)
    elapsed = [point.elapsed_ms for point in result.telemetry.series]
    assert len(elapsed) <= MAX_POINTS and elapsed == sorted(elapsed)
    assert [len(run.telemetry.series) for run in result.runs] == points
    assert result.telemetry.cpu_time_ns == len(points)
    step = max(1, math.ceil(sum(points) / MAX_POINTS))
    kept = Counter(int(elapsed_ms // 1000) for elapsed_ms in elapsed)
    assert all(abs(kept[number] - count / step) < 1 for number, count in enumerate(points)), "each run keeps its share"


def test_a_warm_up_that_a_runner_does_not_time_stays_absent() -> None:
    result = agent_pb2.CandidateResult(warmup=2)
    result.runs.append(run_of(result))
    add_run(result, agent_pb2.CandidateResult(warmup=2), 0.0)
    assert result.warmup == 4 and not result.HasField("warmup_ns")
    add_run(result, agent_pb2.CandidateResult(warmup_ns=7), 0.0)
    assert result.warmup_ns == 7


def test_a_counter_that_one_run_lacks_is_absent() -> None:
    result = agent_pb2.CandidateResult(telemetry=report_pb2.RunTelemetry(cpu_time_ns=5))
    result.runs.append(run_of(result))
    add_run(result, agent_pb2.CandidateResult(), 0.0)
    assert not result.telemetry.HasField("cpu_time_ns")


async def test_a_run_leaves_the_others_what_they_need(board: Board) -> None:
    attempt = prepare(board, lambda progress: None)
    attempt.start.deadline_s = 1080
    assert attempt.share_s(1) == pytest.approx(1080, abs=5) and attempt.share_s(5) == pytest.approx(216, abs=5)
    assert attempt.share_s(5, 100) == pytest.approx(680, abs=5)
    assert attempt.share_s(5, 400) == pytest.approx(216, abs=5), "no run gets less than its equal part"


async def test_later_runs_need_as_long_as_those_before_them_took(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    share_s, needs_s = Attempt.share_s, []

    def note(self: Attempt, runs: int, run_s: float = math.inf) -> float:
        needs_s.append((runs, run_s))
        return share_s(self, runs, run_s)

    monkeypatch.setattr(Attempt, "share_s", note)
    attempt = prepare(board, lambda progress: None)
    wait_s = attempt.target.gates.longest_wait_s
    assert wait_s == NO_WAIT.cool_down_s
    (result,) = (await attempt.run()).candidates
    assert not result.HasField("error"), result.error
    assert needs_s[0] == (3, wait_s), "the plan has no minimum time, and a fixed warm-up"
    measured_s = [run_s - wait_s for _, run_s in needs_s[1:]]
    assert [runs for runs, _ in needs_s] == [3, 2, 1] and measured_s == sorted(measured_s)
    assert measured_s[0] >= result.runs[0].duration_ns / 1e9


def test_a_plan_needs_its_warm_up_and_its_minimum_time() -> None:
    assert planned_s(plan_of(job_pb2.Measurement())) == pytest.approx(11)
    assert planned_s(plan_of(job_pb2.Measurement(warmup=5, min_time_s=3))) == pytest.approx(3)
    assert planned_s(plan_of(job_pb2.Measurement(max_warmup_s=2, min_time_s=0))) == pytest.approx(2)
