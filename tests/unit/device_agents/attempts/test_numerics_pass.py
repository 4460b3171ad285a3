"""The pass that records what every operator gave: after all others, in a process of its own, and nothing that fails in it
costs a number of theirs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from etfarm.device_agents.attempts.attempt import Attempt
from etfarm.device_agents.attempts.interleaved import InterleavedAttempt
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.v1 import agent_pb2, job_pb2
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.wire.words import word_of
from tests.support.attempts import Board, new_attempt, no_runner_is_left
from tests.support.faults import faulty_archive, faulty_program
from tests.support.programs import program
from tests.support.runner import runner_archive

QUICK: dict[str, Any] = {"warmup": 1, "iterations": 2, "min_time_s": 0.0, "numerics": True}


def candidate_of(board: Board, name: str, numerics: bytes | None, runner: Path | None = None) -> agent_pb2.RunCandidate:
    """The program `name`, with `numerics` in the numerics pass; by ExecuTorch's Python binding where there is no runner."""
    bundle = runner and agent_pb2.RunnerBundle(artifact=board.blobs.put(runner.read_bytes()))
    second = None if numerics is None else board.blobs.program(numerics)
    return board.blobs.candidate(name, cell=name, threads=1, bundle=bundle, numerics_program=second)


async def attempt(
    board: Board, *candidates: agent_pb2.RunCandidate, interleave: bool = False, deadline_s: float = 120
) -> list[agent_pb2.CandidateResult]:
    """Return what an attempt of these gives; nothing of it is left on the disk."""
    measurement = job_pb2.Measurement(**QUICK, interleave=interleave)
    start = agent_pb2.StartRun(
        attempt_id="a", device_id="d", candidates=candidates, deadline_s=deadline_s, measurement=measurement
    )
    result = await new_attempt(board, start, kind=InterleavedAttempt if interleave else Attempt).run()
    assert not (board.folder / "run").exists()
    assert await no_runner_is_left()
    return list(result.candidates)


def phases(result: agent_pb2.CandidateResult) -> list[str]:
    return [phase.phase for phase in result.phases if not phase.phase.startswith("WAIT_FOR_")]


def is_measured(result: agent_pb2.CandidateResult) -> bool:
    """Whether all that has nothing to do with numerics is there."""
    return (
        not result.HasField("error") and result.iterations >= 2 and bool(result.samples.size_bytes and result.etdump.size_bytes)
    )


@pytest.mark.parametrize("kind", ["native", "python"])
async def test_the_second_program_is_run_on_the_same_inputs_after_all_else_is_uploaded(board: Board, kind: str) -> None:
    if kind == "python" and not PythonRunner.available():
        pytest.skip("needs torch and executorch")
    runner = runner_archive() if kind == "native" else None
    (result,) = await attempt(board, candidate_of(board, "conv", program("conv").bytes, runner))
    assert not result.numerics.HasField("error"), result.numerics.error
    assert is_measured(result) and word_of(RunnerKind.DESCRIPTOR, result.runner.kind) == kind
    before = ["FETCH", "LOAD", "LOAD_METHOD", "WARMUP", "TIMED", "TRACED", "UPLOAD"]
    assert phases(result) == [*before, "FETCH", "NUMERICS", "UPLOAD"]
    values = result.numerics
    assert values.etdump.size_bytes and values.debug.size_bytes > 1000
    assert values.outputs == result.outputs, "the same program on the same inputs"
    assert values.etdump.digest != result.etdump.digest


async def test_without_a_second_program_there_is_no_such_pass(board: Board) -> None:
    (result,) = await attempt(board, candidate_of(board, "add", None, runner_archive()))
    assert is_measured(result)
    assert not result.HasField("numerics") and "NUMERICS" not in phases(result)


@pytest.mark.parametrize(("fault", "reason"), [("ab1", "PROGRAM_CRASHED"), ("hn1", "PROGRAM_TIMED_OUT")])
@pytest.mark.slow(reason="waits for the end of a time limit")
async def test_a_second_program_that_ends_badly_leaves_the_numbers(board: Board, fault: str, reason: str) -> None:
    candidate = candidate_of(board, "add", faulty_program(fault), faulty_archive())
    (result,) = await attempt(board, candidate, deadline_s=12)
    assert is_measured(result)
    error = result.numerics.error
    assert (error.reason, error.stage) == (reason, "DEBUG")
    assert error.metadata["self_test"] == "passed"
    assert not result.numerics.HasField("etdump")


async def test_an_invalid_second_program_keeps_the_measurement(board: Board) -> None:
    (result,) = await attempt(board, candidate_of(board, "add", b"no program at all", runner_archive()))
    assert is_measured(result)
    assert (result.numerics.error.reason, result.numerics.error.stage) == ("PROGRAM_FAILED", "LOAD")


async def test_values_that_would_fill_the_disk_are_not_kept(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(board.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20))
    (result,) = await attempt(board, candidate_of(board, "conv", program("conv").bytes, runner_archive()))
    assert is_measured(result)
    error = result.numerics.error
    assert error.reason == "DEVICE_STORAGE_FAILED"
    assert error.message.startswith("the intermediate outputs take") and "there is room for 10." in error.message
    assert error.remedy == "Free space on the device."


async def test_candidates_that_take_turns_have_their_pass_after_all_rounds(board: Board) -> None:
    candidates = [
        candidate_of(board, name, second, runner_archive())
        for name, second in (("add", b"no program"), ("conv", program("conv").bytes))
    ]
    bad, good = await attempt(board, *candidates, interleave=True)
    assert is_measured(bad) and bad.blocks and bad.numerics.error.reason == "PROGRAM_FAILED"
    assert is_measured(good) and good.blocks and good.numerics.debug.size_bytes
    assert phases(good)[-4:] == ["UPLOAD", "FETCH", "NUMERICS", "UPLOAD"]
