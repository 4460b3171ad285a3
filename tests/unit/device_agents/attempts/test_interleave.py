"""Candidates that take turns on the real runner: rounds and blocks, who fails leaves the others, nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
from array import array
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.attempts import interleaved
from etfarm.device_agents.attempts.interleaved import ROUNDS, STARTS, InterleavedAttempt, Turns, layout
from etfarm.device_agents.runners.protocol import Measured, MeasurePlan
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from tests.support.attempts import Board, new_attempt, no_runner_is_left
from tests.support.farm import wait_until

QUICK = job_pb2.Measurement(interleave=True, warmup=1, iterations=STARTS * ROUNDS, min_time_s=0)


async def attempt(
    board: Board,
    names: Collection[str],
    *,
    progress: list[agent_pb2.RunProgress] | None = None,
    on_progress: Callable[[agent_pb2.RunProgress], None] | None = None,
    memory_share: float = 0.8,
    **more: Any,
) -> agent_pb2.RunResult:
    start = agent_pb2.StartRun(attempt_id="a", device_id="d", deadline_s=200, measurement=QUICK)
    start.MergeFrom(agent_pb2.StartRun(**more))
    for index, name in enumerate(names):
        candidate = board.blobs.candidate(name, cell=f"cell-{index}", threads=1, writes_state=name == "counter")
        start.candidates.append(candidate)
    receive = on_progress or ((lambda _: None) if progress is None else progress.append)
    result = await new_attempt(board, start, receive, kind=InterleavedAttempt, memory_share=memory_share).run()
    assert not (board.folder / "run").exists()
    assert await no_runner_is_left()
    return result


async def test_candidates_take_turns_in_a_random_order_over_several_starts(board: Board) -> None:
    reported: list[agent_pb2.RunProgress] = []
    result = await attempt(board, ["conv", "add"], progress=reported)
    assert not result.HasField("error")
    one, other = result.candidates
    for each in (one, other):
        assert not each.HasField("error"), each.error
        rounds = [block.round for block in each.blocks]
        assert rounds == list(range(len(rounds))) and len(rounds) >= 20
        assert [block.process_pair for block in each.blocks] == [number // ROUNDS for number in rounds]
        assert len({block.process_pair for block in each.blocks}) >= 5
        assert sum(block.samples for block in each.blocks) == each.iterations == each.samples.size_bytes // 8
        assert each.stop_reason == common_pb2.STOP_REASON_ENOUGH and each.duration_ns > 0
        assert each.traced_ns and each.etdump.size_bytes and each.outputs.size_bytes
        assert each.outputs_equal and each.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_EQUAL
        assert each.load.load_ns and each.load.load_method_ns and each.load.first_run_ns and each.threads == 1
        assert each.memory.planned_bytes and each.memory.peak_rss_bytes
        assert [phase.phase for phase in each.phases] == ["FETCH", "LOAD", "LOAD_METHOD", "WARMUP", "TIMED", "TRACED", "UPLOAD"]
        assert each.telemetry.wall_time_ns and each.telemetry.HasField("runners_cpu_ns")
        assert each.telemetry.runners_cpu_ns >= each.telemetry.cpu_time_ns * 0.9
    places = [(a.place, b.place) for a, b in zip(one.blocks, other.blocks, strict=True)]
    assert set(places) == {(0, 1), (1, 0)}, "each goes first sometimes"
    last = [text for text in reported if text.phase == "TIMED" and text.message][-1]
    assert last.message == f"round {last.done} of {STARTS * ROUNDS}"
    again = await attempt(board, ["conv", "add"])
    assert [block.place for block in again.candidates[0].blocks] == [block.place for block in one.blocks], "of the attempt's id"


async def test_a_program_that_keeps_state_is_known_as_one(board: Board) -> None:
    result = await attempt(board, ["counter", "add"])
    assert [each.repeatability.outcome for each in result.candidates] == [
        report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE,
        report_pb2.REPEATABILITY_OUTCOME_EQUAL,
    ]


def signal_in_block(monkeypatch: pytest.MonkeyPatch, at: int, sent: signal.Signals) -> None:
    """Send the runner of the second candidate a signal before one of its blocks."""
    block = Turns.block

    async def struck(self: Turns, number: int, start: int, place: int) -> None:
        if number == at and self.execution.result.cell_id == "cell-1":
            assert self._runner is not None
            os.kill(self._runner.pid, sent)
        await block(self, number, start, place)

    monkeypatch.setattr(Turns, "block", struck)


async def test_a_candidate_that_crashes_midway_does_not_stop_the_others(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_in_block(monkeypatch, 7, signal.SIGSEGV)
    result = await attempt(board, ["add", "conv", "add"])
    one, crashed, other = result.candidates
    assert (crashed.error.fault, crashed.error.reason) == (common_pb2.FAULT_USER, "PROGRAM_CRASHED")
    assert crashed.error.metadata["self_test"] == "passed" and not crashed.blocks and not crashed.HasField("samples")
    assert len(one.blocks) == len(other.blocks) == STARTS * ROUNDS
    assert not one.HasField("error") and not other.HasField("error")


async def test_a_candidate_that_cannot_be_loaded_does_not_affect_the_other(board: Board) -> None:
    result = await attempt(board, ["external_xnnpack", "add"])
    broken, alone = result.candidates
    assert broken.HasField("error") and not broken.blocks
    assert not alone.HasField("error") and len(alone.blocks) == STARTS * ROUNDS


@pytest.mark.remedy("DEVICE_SELF_TEST_FAILED")
async def test_a_device_that_fails_without_the_program_fails_the_whole_attempt(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(self: Turns, number: int, start: int, place: int) -> None:
        assert self._runner is not None
        os.kill(self._runner.pid, signal.SIGSEGV)
        monkeypatch.setattr("etfarm.device_agents.attempts.steps.self_test_limit_s", lambda *_: 0.0)
        await self._runner.measure(MeasurePlan())

    monkeypatch.setattr(Turns, "block", crash)
    result = await attempt(board, ["add", "conv"])
    assert result.error.reason == "DEVICE_SELF_TEST_FAILED"
    assert {each.error.reason for each in result.candidates} == {"DEVICE_SELF_TEST_FAILED"}
    monkeypatch.undo()  # the board is repaired
    assert not (await attempt(replace(board, folder=board.folder / "again"), ["add", "conv"])).HasField("error")


@pytest.mark.remedy("ATTEMPT_TIMED_OUT")
@pytest.mark.slow(reason="waits for the end of an attempt's time")
async def test_what_hangs_ends_with_the_attempts_time_and_is_the_one_that_is_named(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_in_block(monkeypatch, 2, signal.SIGSTOP)
    result = await attempt(board, ["add", "conv"], deadline_s=12)
    waiting, hung = result.candidates
    assert (hung.error.reason, waiting.error.reason) == ("PROGRAM_TIMED_OUT", "ATTEMPT_TIMED_OUT")
    monkeypatch.undo()
    result = await attempt(replace(board, folder=board.folder / "again"), ["add", "conv"], deadline_s=120)
    assert not any(candidate.HasField("error") for candidate in result.candidates)


async def test_cancelled_twice_it_leaves_no_runner(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, pids = Turns.stop, list[int]()

    async def slow(self: Turns) -> None:
        if self._runner is not None:
            pids.append(self._runner.pid)
        await asyncio.sleep(0)  # as if there was something to wait for
        await stop(self)

    monkeypatch.setattr(Turns, "stop", slow)
    reported, running = list[agent_pb2.RunProgress](), asyncio.Event()

    def receive(progress: agent_pb2.RunProgress) -> None:
        reported.append(progress)
        if progress.phase == "TIMED":
            running.set()

    long = job_pb2.Measurement(interleave=True, warmup=1, min_time_s=60)
    working = asyncio.create_task(attempt(board, ["add", "conv"], on_progress=receive, measurement=long))
    async with asyncio.timeout(60):
        await running.wait()
    working.cancel()
    await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert await asyncio.to_thread(wait_until, lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert len(set(pids[-2:])) == 2, "one of each candidate"


async def test_too_little_memory_for_all_at_once_says_so(board: Board) -> None:
    share = (100 << 20) / psutil.virtual_memory().available
    result = await attempt(board, ["add", "large"], memory_share=share)
    error = result.candidates[1].error
    assert error.reason == "PROGRAM_OUT_OF_MEMORY"
    assert "2 candidates are in memory at once" in error.remedy and "--interleave" in error.remedy


@given(
    st.lists(st.floats(1, 1e11), min_size=1, max_size=8),
    st.integers(1, 10**6),
    st.integers(0, 10**10),
    st.integers(1, 10**11),
    st.integers(1, 10**6),
)
def test_each_gets_its_iterations_and_time_unless_a_limit_stands_against_it(
    medians: list[float], iterations: int, min_ns: int, max_ns: int, most: int
) -> None:
    plan = MeasurePlan(iterations=iterations, min_time_ns=min_ns, max_time_ns=max_ns, max_samples=most)
    rounds = layout(plan, medians)
    assert 1 <= rounds.of_start <= ROUNDS
    for median, number in zip(medians, rounds.iterations, strict=True):
        count = STARTS * ROUNDS
        assert number == 1 or (number * count <= most and number * median * count <= max_ns * 1.001)
        if number * count < iterations or (number + 1) * median * count < min_ns:
            assert number <= max(1, most // count) and ((number + 1) * count > most or (number + 1) * median * count > max_ns)
    slowest = max(median * number for median, number in zip(medians, rounds.iterations, strict=True))
    assert rounds.of_start == 1 or rounds.of_start * STARTS * slowest <= max_ns * 1.001


def test_blocks_of_a_candidate_are_one_pass_in_the_end() -> None:
    one = Measured(1, 5, 2, 10, "ENOUGH", 11, 9, 1, None, 0, 0, 4, 100, array("q", [4, 6]), 3, True)
    other = replace(one, samples_ns=array("q", [7]), iterations=1, duration_ns=7, involuntary_switches=2, peak_rss_bytes=50)
    both = one.joined(other)
    assert (both.iterations, both.duration_ns, both.wall_ns, both.cpu_ns, both.peak_rss_bytes) == (3, 17, 22, 18, 100)
    assert both.involuntary_switches is None, "one of them is not known"
    assert list(both.samples_ns) == [4, 6, 7]
    assert interleaved.STARTS >= 5 and STARTS * ROUNDS >= 20
