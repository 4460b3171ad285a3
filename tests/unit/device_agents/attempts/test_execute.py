"""The decisions of an execution, and what a program does to memory, on the real runner."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.device_agents.attempts.passes import plan_of, traced_iterations
from etfarm.device_agents.conditions.gates import GateLimits
from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.device_agents.daemon.result_outbox import ResultOutbox
from etfarm.device_agents.device.identity import device_id
from etfarm.device_agents.errors import FolderInUse
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.v1 import agent_pb2, common_pb2, compile_pb2, job_pb2, report_pb2
from etfarm.wire import digest
from tests.support.attempts import Board, new_attempt


async def test_a_program_that_needs_too_much_memory_is_the_users_fault(board: Board) -> None:
    share = (100 << 20) / psutil.virtual_memory().available
    start = agent_pb2.StartRun(attempt_id="a", device_id="d", candidates=[board.blobs.candidate("large")], deadline_s=60)
    result = await new_attempt(board, start, memory_share=share).run()
    error = result.candidates[0].error
    assert (error.fault, error.reason) == (common_pb2.FAULT_USER, "PROGRAM_OUT_OF_MEMORY")
    assert error.metadata["self_test"] == "passed"
    assert not (board.folder / "run").exists()


async def test_a_device_that_never_idles_leaves_the_program_its_time(board: Board) -> None:
    measurement = job_pb2.Measurement(warmup=0, iterations=1, min_time_s=0)
    start = agent_pb2.StartRun(attempt_id="a", candidates=[board.blobs.candidate("add")], deadline_s=18, measurement=measurement)
    reported: list[agent_pb2.RunProgress] = []
    never = GateLimits(idle_below=0, idle_wait_s=1000)
    result = await new_attempt(board, start, reported.append, gates=never).run()
    (candidate_result,) = result.candidates
    (wait,) = candidate_result.telemetry.waits
    assert (candidate_result.error.reason, wait.gate, wait.passed) == ("", report_pb2.GATE_IDLE, False)
    assert wait.waited_ms <= 9_000
    assert any("to be below 0" in progress.message for progress in reported)


async def test_without_a_bundle_the_python_binding_runs_it_where_it_is_installed(board: Board) -> None:
    if not PythonRunner.available():
        pytest.skip("needs torch and executorch")
    candidate = board.blobs.candidate("conv", bundle=None, threads=1)
    start = agent_pb2.StartRun(attempt_id="a", device_id="d", candidates=[candidate], deadline_s=120)
    (result,) = (await new_attempt(board, start).run()).candidates
    assert not result.HasField("error"), result.error
    assert (result.runner.kind, result.runner.bundle_digest, result.threads) == (common_pb2.RUNNER_KIND_PYTHON, "", 1)
    assert result.load.first_run_ns > 0
    assert not (board.folder / "run").exists()


@pytest.mark.remedy("NO_RUNNER")
async def test_a_missing_runner_is_reported_to_the_server(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonRunner, "available", lambda: False)  # as on a board that has the agent alone
    start = agent_pb2.StartRun(attempt_id="a", candidates=[board.blobs.candidate("conv", bundle=None)])
    assert (await new_attempt(board, start).run()).candidates[0].error.reason == "NO_RUNNER"
    start.candidates[0].CopyFrom(board.blobs.candidate("conv"))
    (result,) = (await new_attempt(board, start).run()).candidates
    assert not result.HasField("error"), result.error


async def test_a_program_of_other_files_is_not_run(board: Board) -> None:
    given_program = compile_pb2.Program(pte=board.blobs.put(b"no program"), digest=digest.of_program("0" * 64, {}))
    start = agent_pb2.StartRun(attempt_id="a", candidates=[agent_pb2.RunCandidate(cell_id="c", program=given_program)])
    result = await new_attempt(board, start).run()
    assert result.candidates[0].error.reason == "DIGEST_MISMATCH"
    assert list((board.folder / "cache" / "blobs").iterdir()) == []


def test_a_warm_up_goes_on_until_it_is_steady_and_a_number_is_exact() -> None:
    plan = plan_of(job_pb2.Measurement())
    assert (plan.steady, plan.warmup, plan.max_warmup_ns) == (True, 10, 10_000_000_000)
    plan = plan_of(job_pb2.Measurement(warmup=1000))
    assert (plan.steady, plan.warmup) == (False, 1000) and (plan.max_warmup_ns or 0) > 10**14
    plan = plan_of(job_pb2.Measurement(warmup=1000, max_warmup_s=0.5))
    assert plan.max_warmup_ns == 500_000_000


def test_what_a_measurement_leaves_open_has_the_documented_defaults() -> None:
    plan = plan_of(job_pb2.Measurement())
    assert (plan.warmup, plan.iterations, plan.max_samples) == (10, 100, 1_000_000)
    assert (plan.min_time_ns, plan.max_time_ns) == (1_000_000_000, 60_000_000_000)


def test_zero_is_a_value() -> None:
    plan = plan_of(job_pb2.Measurement(warmup=0, min_time_s=0))
    assert (plan.warmup, plan.min_time_ns) == (0, 0)


@given(st.lists(st.integers(1, 10**11), min_size=1), st.integers(1, 1000))
def test_short_programs_are_traced_more_often_and_long_ones_within_a_time(samples: list[int], minimum: int) -> None:
    median = sorted(samples)[len(samples) // 2]
    count = traced_iterations(samples, minimum)
    assert count <= max(minimum, 1000)
    assert count <= max(minimum, 100) or count * median <= 2 * 10**7
    assert count * median <= 20 * 10**9 or count == min(6, minimum)
    if max(minimum, 100) * median <= 20 * 10**9:
        assert count >= minimum
        assert count >= 100 or count * median >= 10**8 - median or count == minimum
    assert count >= 1000 or count * median >= 2 * 10**7 - median or count == minimum


@pytest.mark.parametrize(
    ("median_ns", "count"),
    [(5_000, 1000), (100_000, 200), (1_000_000, 100), (2_000_000, 50), (10_000_000, 30), (10**9, 20), (10**10, 6)],
)
def test_the_default_number_of_traced_iterations_depends_on_the_duration(median_ns: int, count: int) -> None:
    assert traced_iterations([median_ns]) == count


def test_a_device_keeps_its_id_and_agents_beside_it_have_their_own() -> None:
    machine, one, other = "3d1219c7c4c5404aaa1f6d2a48adfda4", "agent-1", "agent-2"
    default = device_id(machine, one, is_default_folder=True)
    assert default == device_id(machine, other, is_default_folder=True)
    ids = {default, device_id(machine, one, is_default_folder=False), device_id(machine, other, is_default_folder=False)}
    assert len(ids) == 3 and all(len(each) == 16 for each in ids)
    assert not any(each in machine for each in ids)
    assert device_id("", one, is_default_folder=True) == one


def test_the_agents_id_outlives_the_process(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "agent")
    agent_id = folder.agent_id()
    with pytest.raises(FolderInUse):
        DataFolder(tmp_path / "agent")
    folder.close()
    again = DataFolder(tmp_path / "agent")
    assert again.agent_id() == agent_id
    again.close()


async def test_results_outlive_the_process_until_they_are_acknowledged(tmp_path: Path) -> None:
    results = ResultOutbox(tmp_path)
    for attempt in ("../../etc/passwd", "b"):
        await results.put(agent_pb2.RunResult(attempt_id=attempt, device_id="d"))
    (tmp_path / "half.pb.part").write_bytes(b"\xff")
    again = ResultOutbox(tmp_path)
    assert dict(again.waiting) == dict(results.waiting)
    again.drop("../../etc/passwd")
    again.drop("unknown")
    assert list(ResultOutbox(tmp_path).waiting) == ["b"]
