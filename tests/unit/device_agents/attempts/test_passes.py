"""The passes of a measurement on the real runner: what they record, and why their outputs differ where they do."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.attempts import output_diff
from etfarm.device_agents.attempts.passes import Passes, plan_of
from etfarm.device_agents.conditions.sampler import LONGEST_READING_S, Sampled, Sampler, watched
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from etfarm.wire import tensors
from etfarm.wire.tensors import Scalar, Tensor, Value
from etfarm.wire.words import word_of
from tests.support.phases import RecordedPhases
from tests.support.programs import program
from tests.support.runner import loaded as load_program
from tests.support.runner import runner_bundle

__all__ = ["runner_bundle"]


@asynccontextmanager
async def loaded(
    name: str, bundle: Bundle, folder: Path
) -> AsyncIterator[tuple[Passes, agent_pb2.CandidateResult, RecordedPhases]]:
    result, received = agent_pb2.CandidateResult(), RecordedPhases()
    folder.mkdir(exist_ok=True)
    async with NativeRunner.start(bundle.command(), folder) as runner:
        await runner.hello()
        await runner.threads(1)
        await load_program(runner, program(name))
        yield Passes(runner, "forward", result, received), result, received


class Unhurried(Sampler):
    """Ends once it has a point, however long its thread was kept from running."""

    def end(self, wait_s: float = LONGEST_READING_S) -> Sampled | None:
        while not self._points.taken:
            time.sleep(0.001)
        return super().end(wait_s)


SHORT = job_pb2.Measurement(warmup=3, iterations=20, min_time_s=0)


async def test_a_measurement_records_itself_and_its_surroundings(runner_bundle: Bundle, tmp_path: Path) -> None:
    async with loaded("conv", runner_bundle, tmp_path) as (passes, result, received):
        plan = plan_of(job_pb2.Measurement(iterations=20, min_time_s=0.3, max_warmup_s=20))
        samples = await passes.measure(plan, watched(lambda: Unhurried([[0]], interval_s=0.02)))
        outputs = await passes.compared_outputs(tmp_path / "trace.etdp", 10, writes_state=False)
    assert received.phases == ["WARMUP", "TIMED", "TRACED"]
    assert len(samples) == result.iterations >= 20
    assert result.stop_reason in {
        common_pb2.STOP_REASON_ENOUGH,
        common_pb2.STOP_REASON_SETTLED,
        common_pb2.STOP_REASON_DRIFTING,
    }, "another pace of the machine makes a pass longer"
    assert result.HasField("steady") and result.warmup >= 10 and result.warmup_ns > 0
    assert (
        result.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_EQUAL
        and result.outputs_equal
        and not result.repeatability.differences
    )
    np.testing.assert_allclose(tensors.to_array(outputs[0]), tensors.to_array(program("conv").expected[0]), rtol=1e-5, atol=1e-6)
    telemetry = result.telemetry
    assert telemetry.cpu_time_ns > 0 and telemetry.series and telemetry.sampler_cpu_ns > 0
    assert telemetry.before.elapsed_ms < telemetry.series[0].elapsed_ms <= telemetry.after.elapsed_ms
    assert telemetry.after.cpu_busy_ns > telemetry.before.cpu_busy_ns
    assert len(result.traced_ns) == 10
    assert result.traced_telemetry.wall_time_ns >= sum(result.traced_ns) and result.traced_telemetry.cpu_time_ns > 0
    assert not result.traced_telemetry.series


async def test_a_number_of_warm_ups_is_exact_and_says_nothing_of_steadiness(runner_bundle: Bundle, tmp_path: Path) -> None:
    async with loaded("add", runner_bundle, tmp_path) as (passes, result, _):
        await passes.measure(plan_of(SHORT), watched(lambda: Sampler([])))
    assert (result.warmup, result.iterations) == (3, 20) and not result.HasField("steady")


@pytest.mark.parametrize("traced", [True, False])
async def test_a_stateful_program_is_distinguished_from_a_nondeterministic_program(
    runner_bundle: Bundle, tmp_path: Path, traced: bool
) -> None:
    for name, outcome in (("counter", "KEEPS_STATE"), ("random", "NONDETERMINISTIC"), ("add", "EQUAL")):
        async with loaded(name, runner_bundle, tmp_path / name) as (passes, result, _):
            await passes.measure(plan_of(SHORT), watched(lambda: Sampler([])))
            etdump = tmp_path / "trace.etdp" if traced else None
            outputs = await passes.compared_outputs(etdump, 10, writes_state=name == "counter")
        assert word_of(report_pb2.RepeatabilityOutcome.DESCRIPTOR, result.repeatability.outcome) == outcome
        assert result.outputs_equal is (outcome != "NONDETERMINISTIC")
        if outcome != "NONDETERMINISTIC":
            expected = program(name).expected[0]
            assert isinstance(expected, Tensor) and isinstance(outputs[0], Tensor)
            assert outputs[0].data == expected.data, "outputs are those of the first execution"
        if outcome == "KEEPS_STATE":
            (actual,) = result.repeatability.differences
            # The counter is 1 after the first execution, 11 after ten traced ones more, 23 after the timed pass.
            other, gap = (report_pb2.EXECUTION_TRACED_LAST, 10) if traced else (report_pb2.EXECUTION_TIMED_LAST, 22)
            assert (actual.first, actual.second) == (report_pb2.EXECUTION_FIRST, other)
            assert (actual.max_abs_difference, list(actual.at)) == (gap, [0])
            assert (actual.differing, actual.elements) == (1, 1)
        if outcome == "NONDETERMINISTIC":
            (actual,) = result.repeatability.differences
            assert (actual.first, actual.second) == (report_pb2.EXECUTION_FIRST, report_pb2.EXECUTION_REPEATED)
            assert actual.elements == 6
            assert 0 < actual.max_abs_difference < 1


@pytest.mark.parametrize("traced", [True, False])
async def test_a_program_that_reads_what_earlier_executions_left_has_hidden_state(
    runner_bundle: Bundle, tmp_path: Path, traced: bool
) -> None:
    async with loaded("unwritten", runner_bundle, tmp_path / "work") as (passes, result, _):
        await passes.measure(plan_of(SHORT), watched(lambda: Sampler([])))
        outputs = await passes.compared_outputs(tmp_path / "trace.etdp" if traced else None, 10, writes_state=False)
    assert result.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_HIDDEN_STATE
    assert result.HasField("outputs_equal") and not result.outputs_equal
    (actual,) = result.repeatability.differences
    assert actual.max_abs_difference > 0.05
    gap = np.abs(tensors.to_array(outputs[0]) - tensors.to_array(program("unwritten").expected[0])).max()
    assert gap > 0.05, "the first execution is right, and is not what is compared"


@pytest.mark.parametrize("traced", [True, False])
async def test_outputs_that_differ_in_their_last_bits_differ_by_rounding(
    runner_bundle: Bundle, tmp_path: Path, traced: bool
) -> None:
    async with loaded("rounding", runner_bundle, tmp_path / "work") as (passes, result, _):
        await passes.measure(plan_of(SHORT), watched(lambda: Sampler([])))
        await passes.compared_outputs(tmp_path / "trace.etdp" if traced else None, 10, writes_state=False)
    assert result.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_ROUNDING
    assert result.HasField("outputs_equal") and not result.outputs_equal
    (actual,) = result.repeatability.differences
    assert 0 < actual.max_abs_difference < actual.rounding == pytest.approx(2**-16, rel=1e-4)


@pytest.mark.parametrize(
    ("first", "second", "is_rounding"),
    [
        (np.float32([1, 100]), np.float32([1, 100.001]), True),
        (np.float32([1, 100]), np.float32([1, 100.01]), False),
        (np.float32([1, 1]), np.float32([1, np.nan]), False),
        (np.float32([np.inf, 1]), np.float32([np.inf, 1 + 1e-6]), True),
        (np.float16([1, 2]), np.float16([1, 2.01]), True),
        (np.float16([1, 2]), np.float16([1, 2.1]), False),
        (np.int8([1, 100]), np.int8([1, 101]), False),
    ],
)
def test_rounding_depends_on_the_dtype_and_the_largest_magnitude(first: Any, second: Any, is_rounding: bool) -> None:
    differences = output_diff.compare([_tensor(first)], [_tensor(second)])
    assert differences and output_diff.is_rounding(differences) is is_rounding


def _tensor(array: np.ndarray, order: tuple[int, ...] = ()) -> Tensor:
    return tensors.from_array("y", array, order or tuple(range(array.ndim)))


FLOATS = st.lists(st.floats(width=32), min_size=1, max_size=24)


@given(FLOATS, st.data())
def test_differences_are_numpys(values: list[float], data: st.DataObject) -> None:
    one = np.array(values, dtype=np.float32)
    other = one.copy()
    for index in data.draw(st.lists(st.integers(0, len(values) - 1))):
        other[index] = data.draw(st.floats(width=32))
    executions = report_pb2.EXECUTION_FIRST, report_pb2.EXECUTION_TIMED_LAST
    result = output_diff.compare([_tensor(one)], [_tensor(other)], executions)
    different = one.view(np.uint32) != other.view(np.uint32)
    assert bool(result) == different.any() == (not output_diff.equal([_tensor(one)], [_tensor(other)]))
    if result:
        (reported,) = result
        assert (reported.output, reported.first, reported.second) == ("y", *executions)
        assert (reported.differing, reported.elements) == (different.sum(), len(values))
        gaps = np.abs(one.astype(np.float64) - other.astype(np.float64))
        if np.isfinite(gaps[different]).any():
            largest = np.max(gaps[different & np.isfinite(gaps)])
            assert reported.max_abs_difference == largest
            assert gaps[reported.at[0]] == largest and different[reported.at[0]]
        else:
            assert not reported.HasField("max_abs_difference") and different[reported.at[0]]


def test_a_place_is_reported_in_the_order_of_the_dims_for_any_memory_layout() -> None:
    one = np.zeros((1, 2, 3, 4), dtype=np.float32)
    other = one.copy()
    other[0, 1, 2, 3] = 5
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        (reported,) = output_diff.compare([_tensor(one, order)], [_tensor(other, order)])
        assert list(reported.at) == [0, 1, 2, 3] and reported.max_abs_difference == 5


@pytest.mark.parametrize("dtype", sorted(tensors.ITEM_BYTES))
def test_every_dtype_is_compared(dtype: str) -> None:
    one = np.array([0, 1, 1], dtype=tensors.dtype_of(dtype))
    other = np.array([0, 1, 0], dtype=tensors.dtype_of(dtype))
    (reported,) = output_diff.compare([_tensor(one)], [_tensor(other)])
    assert (reported.differing, reported.elements) == (1, 3)
    assert reported.HasField("max_abs_difference") is not dtype.startswith("float8")
    if reported.HasField("max_abs_difference"):
        assert (reported.max_abs_difference, list(reported.at)) == (1, [2])


def test_scalars_shapes_and_nan() -> None:
    nan, x = Scalar("s", math.nan), _tensor(np.zeros(2, np.float32))
    assert output_diff.equal([nan, x], [nan, x])
    assert not output_diff.equal([x], [x, x])
    scalars: list[Value] = [Scalar("s", 3), Scalar("n", None)]
    reported = output_diff.compare(scalars, [Scalar("s", 5), Scalar("n", True)])
    assert [(each.output, each.max_abs_difference) for each in reported] == [("s", 2), ("n", 0)]
    (shape,) = output_diff.compare([x], [_tensor(np.zeros(3, np.float32))])
    assert not shape.HasField("elements"), "other shapes are not compared element by element"
    empty = _tensor(np.zeros((0, 4), np.float32))
    assert output_diff.compare([empty], [empty]) == []
