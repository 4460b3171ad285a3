"""Executions for accuracy alone, after all other passes and without a risk for the measurement.

Each further sample starts from the initial state, and each call continues the state of those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etfarm.device_agents.attempts import further
from etfarm.device_agents.attempts.attempt import Attempt
from etfarm.device_agents.attempts.interleaved import InterleavedAttempt
from etfarm.v1 import agent_pb2, job_pb2
from etfarm.wire import tensors
from etfarm.wire.samples import MAX_OUTPUTS_BYTES
from tests.support.attempts import Board, new_attempt
from tests.support.programs import program

QUICK: dict[str, Any] = {"warmup": 1, "iterations": 2, "min_time_s": 0.0}


async def attempt(
    board: Board,
    samples: dict[str, list[np.ndarray]],
    *,
    calls: Sequence[tuple[str, float]] = (),
    interleave: bool = False,
) -> list[agent_pb2.CandidateResult]:
    """Measure programs by name, each with samples of one value per input, and with calls of methods of one number."""
    start = agent_pb2.StartRun(
        attempt_id="a", device_id="d", deadline_s=120, measurement=job_pb2.Measurement(**QUICK, interleave=interleave)
    )
    for name, values in samples.items():
        files = [tensors.encode([tensors.from_array(each.name, value) for each in program(name).inputs]) for value in values]
        numbers = [tensors.encode([tensors.from_array("x", np.array([number], "<f4"))]) for _, number in calls]
        run_calls = [
            agent_pb2.RunCall(method=name, inputs=board.blobs.put(file)) for (name, _), file in zip(calls, numbers, strict=True)
        ]
        stored, method = [board.blobs.put(file) for file in files], calls[0][0] if calls else ""
        start.candidates.append(board.blobs.candidate(name, cell=name, threads=1, samples=stored, method=method, calls=run_calls))
    kind = InterleavedAttempt if interleave else Attempt
    return list((await new_attempt(board, start, kind=kind).run()).candidates)


def outputs_of(board: Board, result: agent_pb2.FurtherOutputs) -> list[list[float]]:
    values = tensors.decode(board.blobs.blobs[result.outputs.digest])
    return [tensors.to_array(value).ravel().tolist() for value in values if isinstance(value, tensors.Tensor)]


async def test_each_sample_is_executed_from_the_initial_state_after_all_else(board: Board) -> None:
    ten, twenty = np.array([10], "<f4"), np.array([20], "<f4")
    (result,) = await attempt(board, {"counter": [ten, twenty]})
    assert not result.HasField("error") and result.iterations == 2
    assert (result.further.samples, result.further.HasField("error")) == (2, False)
    assert outputs_of(board, result.further) == [[11], [21]]
    phases = [phase.phase for phase in result.phases]
    assert phases.index("TRACED") < phases.index("SAMPLES") < phases.index("UPLOAD")


async def test_a_sample_that_does_not_fit_ends_the_samples_and_nothing_else(board: Board) -> None:
    fits = np.full((2, 3), 2, "<f4")
    (result,) = await attempt(board, {"add": [fits, np.zeros((9, 9), "<f4"), fits]})
    assert not result.HasField("error") and result.samples.size_bytes and result.outputs.size_bytes
    assert result.further.samples == 1 and result.further.error.reason
    assert outputs_of(board, result.further) == [[4] * 6]


async def test_interleaved_programs_have_samples_too(board: Board) -> None:
    results = await attempt(board, {"add": [np.ones((2, 3), "<f4")], "counter": [np.zeros(1, "<f4")]}, interleave=True)
    assert [outputs_of(board, result.further) for result in results] == [[[2] * 6], [[1]]]
    assert not any(result.HasField("calls") for result in results)


async def test_each_call_continues_the_state_of_those_before(board: Board) -> None:
    calls = [("tens", 0.5), ("ones", 0.0), ("ones", 0.0), ("tens", 0.0)]
    (result,) = await attempt(board, {"counters": []}, calls=calls)
    assert not result.HasField("error") and not result.HasField("further")
    assert (result.calls.samples, result.calls.HasField("error")) == (4, False)
    assert outputs_of(board, result.calls) == [[10.5], [1], [2], [20]]
    phases = [phase.phase for phase in result.phases]
    assert phases.index("TRACED") < phases.index("CALLS") < phases.index("UPLOAD")


async def test_a_call_that_fails_ends_the_calls_and_nothing_else(board: Board) -> None:
    (result,) = await attempt(board, {"counters": []}, calls=[("ones", 0.0), ("hundreds", 0.0)])
    assert not result.HasField("error") and result.samples.size_bytes
    assert result.calls.samples == 0 and "hundreds" in result.calls.error.message


async def test_no_sample_is_executed_after_large_outputs(tmp_path: Path) -> None:
    (tmp_path / "x.ett").write_bytes(tensors.encode([tensors.from_array("x", np.zeros(1, "<f4"))]))
    runner: Any = None
    large = [tensors.from_array("y", np.zeros(MAX_OUTPUTS_BYTES + 1, "u1"))]
    left_out = await further.execute(runner, "forward", [tmp_path / "x.ett"], large, keeps_state=False)
    assert left_out.samples == 0 and not left_out.outputs
    assert left_out.error is not None and left_out.error.reason == "SAMPLES_LEFT_OUT"
    assert left_out.error.message == "The outputs of the first 1 of 2 samples exceed 32 MiB."


class Slow:
    """A runner whose executions take 10 s each, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    async def load_method(self, name: str) -> None: ...

    async def set_inputs(self, values: list[tensors.Value]) -> None: ...

    async def run(self) -> None:
        self.now_s += 10

    async def outputs(self) -> list[tensors.Value]:
        return [tensors.from_array(name, np.full(1, self.now_s, "<f4")) for name in "yz"]


@pytest.mark.remedy("SAMPLES_LEFT_OUT")
async def test_the_number_of_samples_in_time_is_a_power_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.ett").write_bytes(tensors.encode([tensors.from_array("x", np.zeros(1, "<f4"))]))
    runner: Any = Slow()
    monkeypatch.setattr(further, "time", runner)
    first = await runner.outputs()
    # Six samples with the timed inputs are executed within the limit, of which four are kept.
    result = await further.execute(runner, "forward", [tmp_path / "x.ett"] * 63, first, keeps_state=False, limit_s=45)
    assert result.samples == 3 and [value.data for value in result.outputs] == [
        np.full(1, at_s, "<f4").tobytes() for at_s in (10, 10, 20, 20, 30, 30)
    ]
    assert result.error is not None and result.error.message == "The device needs more than 45 s for 64 samples."
    fewer = await further.execute(runner, "forward", [tmp_path / "x.ett"] * 3, first, keeps_state=False, limit_s=45)
    assert (fewer.samples, fewer.error) == (3, None)
