"""What an agent cannot have measured is a device fault, and what an honest one sends is not."""

from __future__ import annotations

import os
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.jobs.cells.plausibility import ImplausibleResult, Plan, artifacts_of, check_attempt, check_candidate
from etfarm.v1 import agent_pb2, common_pb2, job_pb2, report_pb2
from etfarm.wire.chunks import artifact_of
from tests.support.golden import Golden

MEASUREMENT = job_pb2.Measurement(iterations=4, min_time_s=0.004)
PLAN = Plan(frozenset({"c"}), elapsed_s=3.0, measurement=MEASUREMENT)
INTERLEAVED = Plan(frozenset({"c"}), 3.0, job_pb2.Measurement(iterations=4, min_time_s=0.004, interleave=True))
SAMPLES = [1_000_000, 1_100_000, 900_000, 1_000_000]

LASTED = [common_pb2.STOP_REASON_MAX_TIME, common_pb2.STOP_REASON_MAX_SAMPLES, common_pb2.STOP_REASON_SETTLED]


def honest(samples: Sequence[int] = SAMPLES) -> agent_pb2.CandidateResult:
    """Return what a real agent sends of a run whose samples these are."""
    result = agent_pb2.CandidateResult(
        cell_id="c", threads=1, iterations=len(samples), duration_ns=sum(samples) + 2_000,
        stop_reason=common_pb2.STOP_REASON_ENOUGH,
        warmup=10,
        warmup_ns=10_000_000, traced_ns=[1_200_000] * 10,
    )  # fmt: skip
    result.samples.CopyFrom(artifact_of(array("q", samples).tobytes()))
    result.load.load_ns = 2_000_000
    result.phases.add(phase="TIMED", start_ms=20.0, duration_ms=4.1)
    return result


def check(result: agent_pb2.CandidateResult, folder: Path, plan: Plan = PLAN, samples: Sequence[int] = SAMPLES) -> None:
    path = folder / "samples"
    path.write_bytes(array("q", samples).tobytes())
    check_candidate(result, plan, lambda digest: path)


@given(st.lists(st.integers(300, 50_000_000), min_size=1, max_size=200), st.sampled_from(LASTED))
def test_any_pass_that_a_clock_can_give_is_plausible(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], why: common_pb2.StopReason.ValueType
) -> None:
    result = honest(times)
    result.stop_reason = why
    plan = Plan(frozenset({"c"}), elapsed_s=sum(times) / 1e9 + 1.0, measurement=job_pb2.Measurement())
    check(result, tmp_path_factory.mktemp("pass"), plan, times)


def test_an_honest_result_is_plausible_and_one_with_an_error_needs_no_samples(tmp_path: Path) -> None:
    check(honest(), tmp_path)
    check(agent_pb2.CandidateResult(cell_id="c", error=common_pb2.Error(reason="PROGRAM_FAILED")), tmp_path)


def _set(**values: object) -> Callable[[agent_pb2.CandidateResult], None]:
    def change(result: agent_pb2.CandidateResult) -> None:
        for name, value in values.items():
            setattr(result, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set(iterations=5),
        _set(iterations=0),
        _set(iterations=2_000_000),
        _set(iterations=-1),
        _set(stop_reason=99),
        _set(duration_ns=3_000_000, stop_reason=common_pb2.STOP_REASON_MAX_TIME),
        _set(duration_ns=3_000_000_000),
        _set(duration_ns=20_000_000_000),
        _set(warmup_ns=20_000_000_000),
        _set(duration_ns=-5),
        lambda result: result.traced_ns.append(60_000_000_000),
        lambda result: result.traced_ns.append(-1),
        lambda result: result.phases.add(phase="X", start_ms=0, duration_ms=60_000),
        lambda result: result.phases.add(phase="X", start_ms=float("nan")),
        lambda result: result.load.__setattr__("load_method_ns", 60_000_000_000),
        lambda result: result.outputs.__setattr__("digest", "../../etc"),
        lambda result: result.blocks.add(samples=3),
    ],
)
def test_what_cannot_be_is_refused(golden: Golden, tmp_path: Path, change: Callable[[agent_pb2.CandidateResult], None]) -> None:
    result = honest()
    change(result)
    with golden.refuses("RESULT_IMPLAUSIBLE", "not plausible"):
        check(result, tmp_path)


def repeated() -> agent_pb2.CandidateResult:
    """Return what a real agent sends of two runs of four iterations."""
    result = honest(SAMPLES * 2)
    for _ in range(2):
        result.runs.add(
            iterations=4, duration_ns=result.duration_ns // 2, stop_reason=common_pb2.STOP_REASON_ENOUGH,
            warmup=5, warmup_ns=result.warmup_ns // 2,
        )  # fmt: skip
    return result


TWICE = Plan(frozenset({"c"}), 3.0, job_pb2.Measurement(iterations=4, min_time_s=0.003, repeat=2))


def test_honest_runs_are_plausible_and_so_is_an_older_agent_that_makes_one(tmp_path: Path) -> None:
    check(repeated(), tmp_path, TWICE, SAMPLES * 2)
    check(honest(), tmp_path, TWICE)


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result.runs.add(iterations=0),
        lambda result: result.runs[0].__setattr__("iterations", 5),
        lambda result: result.runs[0].__setattr__("iterations", -4),
        lambda result: result.runs[1].__setattr__("duration_ns", 1),
        lambda result: result.runs[1].__setattr__("stop_reason", 99),
        lambda result: result.runs[1].__setattr__("warmup_ns", -1),
        lambda result: result.runs[1].load.__setattr__("load_ns", 60_000_000_000),
        lambda result: result.runs[1].telemetry.series.extend([report_pb2.TelemetryPoint()] * 121),
        lambda result: result.blocks.add(samples=8),
        lambda result: result.runs[1].__setattr__("duration_ns", 20_000_000_000),
        lambda result: result.runs[1].__setattr__("warmup_ns", 20_000_000_000),
        lambda result: result.runs[1].__setattr__("warmup_ns", 1),
        lambda result: result.runs[1].__setattr__("warmup", 1),
    ],
)
def test_runs_that_cannot_be_are_refused(
    golden: Golden, tmp_path: Path, change: Callable[[agent_pb2.CandidateResult], None]
) -> None:
    result = repeated()
    change(result)
    with golden.refuses("RESULT_IMPLAUSIBLE"):
        check(result, tmp_path, TWICE, SAMPLES * 2)


def test_all_runs_share_the_samples_that_a_job_without_a_limit_has(tmp_path: Path) -> None:
    result = repeated()
    result.iterations = 500_005
    result.runs[0].iterations = 500_001
    with pytest.raises(ImplausibleResult, match="500,001 timed iterations were measured; 1 to 500,000 are possible"):
        check(result, tmp_path, TWICE, SAMPLES * 2)
    limited = job_pb2.Measurement()
    limited.CopyFrom(TWICE.measurement)
    limited.max_samples = 500_001
    with pytest.raises(ImplausibleResult, match="bytes of samples"):
        check(result, tmp_path, Plan(TWICE.cells, TWICE.elapsed_s, limited), SAMPLES * 2)


@pytest.mark.parametrize("forged", [[1, 1, 1, 1], [0] * 4, [-1_000_000, *SAMPLES[1:]], [4_000_000] * 4])
def test_samples_that_are_not_of_the_pass_are_refused(tmp_path: Path, forged: list[int]) -> None:
    with pytest.raises(ImplausibleResult):
        check(honest(), tmp_path, samples=forged)


def test_a_pass_of_one_nanosecond_an_iteration_is_refused_whatever_its_duration(golden: Golden, tmp_path: Path) -> None:
    forged = [1] * 1000
    plan = Plan(frozenset({"c"}), elapsed_s=3.0, measurement=job_pb2.Measurement(iterations=10))
    with golden.refuses("RESULT_IMPLAUSIBLE"):
        check(honest(forged), tmp_path, plan, forged)


def test_enough_is_what_was_asked_for(tmp_path: Path) -> None:
    for asked in (job_pb2.Measurement(iterations=5), job_pb2.Measurement(min_time_s=1)):
        with pytest.raises(ImplausibleResult, match="enough"):
            check(honest(), tmp_path, Plan(frozenset({"c"}), 3.0, asked))


def test_a_run_without_a_measurement_has_no_samples(golden: Golden, tmp_path: Path) -> None:
    with golden.refuses("RESULT_IMPLAUSIBLE"):
        check(honest(), tmp_path, Plan(frozenset({"c"}), 3.0))


def test_an_attempt_names_its_own_cells_once_and_takes_no_longer_than_it_lasted(golden: Golden) -> None:
    first, second = honest(), honest()
    check_attempt(agent_pb2.RunResult(candidates=[first]), PLAN)
    with pytest.raises(ImplausibleResult, match="twice"):
        check_attempt(agent_pb2.RunResult(candidates=[first, second]), PLAN)
    second.cell_id = "of another job"
    with golden.refuses("RESULT_IMPLAUSIBLE"):
        check_attempt(agent_pb2.RunResult(candidates=[first, second]), PLAN)
    both = Plan(frozenset({"c", "d"}), 3.0, MEASUREMENT)
    second.cell_id = "d"
    first.duration_ns = second.duration_ns = 5_000_000_000
    with golden.refuses("RESULT_IMPLAUSIBLE"):
        check_attempt(agent_pb2.RunResult(candidates=[first, second]), both)


@pytest.mark.parametrize(
    ("what", "limit", "fill"),
    [
        ("traced iterations", 1_000, lambda result, count: result.traced_ns.extend([1_000] * (count - len(result.traced_ns)))),
        ("blocks", 1_000, lambda result, count: [result.blocks.add() for _ in range(count)]),
        ("points of telemetry", 120, lambda result, count: [result.telemetry.series.add() for _ in range(count)]),
    ],
)
def test_lists_of_a_result_have_at_most_the_length_that_an_honest_agent_sends(
    tmp_path: Path, what: str, limit: int, fill: Callable[[agent_pb2.CandidateResult, int], None]
) -> None:
    longest, longer = honest(), honest()
    fill(longest, limit)
    if longest.blocks:
        longest.blocks[0].samples = longest.iterations
    check(longest, tmp_path, INTERLEAVED)
    fill(longer, limit + 1)
    with pytest.raises(ImplausibleResult, match=f"it has {limit + 1:,} {what}, more than {limit:,}"):
        check(longer, tmp_path)


@pytest.mark.parametrize(
    ("plan", "blocks", "why"),
    [
        (PLAN, [{"samples": 4}], "which the job did not request"),
        (INTERLEAVED, [{"samples": 6}, {"samples": -2}], "a number of a block is negative"),
        (INTERLEAVED, [{"samples": 4, "round": -1}], "a number of a block is negative"),
    ],
)
def test_blocks_that_cannot_be_are_refused(tmp_path: Path, plan: Plan, blocks: list[dict[str, int]], why: str) -> None:
    result = honest()
    for block in blocks:
        result.blocks.add(**block)
    with pytest.raises(ImplausibleResult, match=why):
        check(result, tmp_path, plan)


def test_all_artifacts_of_a_result_are_found() -> None:
    result = honest()
    result.etdump.digest, result.numerics.debug.digest, result.outputs.digest = "e", "d", "o"
    assert {artifact.digest for artifact in artifacts_of(result)} == {result.samples.digest, "e", "d", "o"}


def test_a_file_of_samples_that_is_larger_than_its_result_says_is_not_read(golden: Golden, tmp_path: Path) -> None:
    path = tmp_path / "samples"
    path.touch()
    os.truncate(path, 64 << 20)
    tracemalloc.start()
    try:
        with golden.refuses("RESULT_IMPLAUSIBLE"):
            check_candidate(honest(), PLAN, lambda digest: path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_many_samples_are_looked_at_in_pieces(tmp_path: Path) -> None:
    result, path = honest(), tmp_path / "samples"
    result.iterations = 1_000_000
    result.duration_ns, result.samples.size_bytes = 100_000_000, 8_000_000
    path.write_bytes(array("q", [100]).tobytes() * 1_000_000)
    plan = Plan(frozenset({"c"}), elapsed_s=3.0, measurement=job_pb2.Measurement(iterations=1, max_samples=1_000_000))
    tracemalloc.start()
    try:
        check_candidate(result, plan, lambda digest: path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
