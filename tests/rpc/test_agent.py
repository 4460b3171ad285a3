"""The agent as a real process: runs with its real runner, and their outcomes."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from etfarm.device_agents.attempts.passes import traced_iterations
from etfarm.v1 import common_pb2, job_pb2, report_pb2
from etfarm.wire import tensors
from tests.support.agent import LONG, WAIT_S, Launch, Server, join, launch, server
from tests.support.farm import PROMPTLY_S
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="starts an agent's process for each test")

__all__ = ["join", "launch", "server"]


def values(server: Server, artifact: common_pb2.Artifact) -> list[np.ndarray]:
    decoded = tensors.decode(server.blobs[artifact.digest])
    return [tensors.to_array(value) for value in decoded if isinstance(value, tensors.Tensor)]


def expected(name: str) -> list[np.ndarray]:
    return [tensors.to_array(value) for value in program(name).expected if isinstance(value, tensors.Tensor)]


TRIES = 10
"""Of a time that a busy machine may exceed."""
SHORT = job_pb2.Measurement(warmup=1, iterations=5, min_time_s=0)
LASTED = {common_pb2.STOP_REASON_ENOUGH, common_pb2.STOP_REASON_SETTLED, common_pb2.STOP_REASON_DRIFTING}
"""How a pass of at least so many seconds ends."""


async def test_a_benchmark_returns_samples_outputs_a_trace_and_counters(server: Server, join: Launch) -> None:
    _, connection = await join()
    measurement = job_pb2.Measurement(warmup=3, iterations=20, min_time_s=0.1)
    connection.start("a1", server.candidate("conv"), measurement=measurement, deadline_s=60)
    result = await connection.result("a1")
    (cell,) = result.candidates
    assert not result.HasField("error") and not cell.HasField("error"), cell.error
    samples = server.blobs[cell.samples.digest]
    times = struct.unpack(f"<{cell.iterations}q", samples)
    assert cell.iterations >= 20 and min(times) > 0 and cell.warmup == 3
    assert cell.stop_reason in LASTED, "another pace of the machine makes a pass longer"
    assert cell.duration_ns >= max(100_000_000, sum(times))
    assert cell.outputs_equal is True
    np.testing.assert_allclose(values(server, cell.outputs)[0], expected("conv")[0], rtol=1e-5, atol=1e-6)
    assert len(server.blobs[cell.etdump.digest]) > 100
    assert len(cell.traced_ns) == traced_iterations(times)
    assert [phase.phase for phase in cell.phases] == ["FETCH", "LOAD", "LOAD_METHOD", "WARMUP", "TIMED", "TRACED", "UPLOAD"]
    starts = [phase.start_ms for phase in cell.phases]
    assert starts == sorted(starts) and starts[0] >= 0
    assert cell.threads == connection.hello.devices[0].clusters[0].physical_cores
    assert cell.runner.kind == common_pb2.RUNNER_KIND_NATIVE and not cell.runner.HasField("cores")
    assert cell.memory.peak_rss_bytes > 1 << 20 and sum(cell.memory.planned_bytes) > 0
    assert cell.telemetry.cpu_time_ns > 0
    begun = [m.run_progress.phase for m in connection.received if m.HasField("run_progress")]
    assert list(dict.fromkeys(begun)) == [phase.phase for phase in cell.phases]


async def test_a_wait_before_a_measurement_is_reported_and_ends(server: Server, join: Launch) -> None:
    _, connection = await join("--idle-wait", "2", "--idle-below", "0", "--cool-below", "1000")
    cell = await connection.run(server.candidate("add"), measurement=SHORT)
    assert not cell.HasField("error"), cell.error
    assert [phase.phase for phase in cell.phases][:3] == ["FETCH", "WAIT_FOR_IDLE", "LOAD"]
    (wait,) = cell.telemetry.waits
    # The looks themselves, which are no waiting, may be longer than they should.
    assert (wait.gate, wait.passed, wait.threshold) == (report_pb2.GATE_IDLE, False, 0) and wait.waited_ms >= 1900
    reported = [m.run_progress.message for m in connection.received if m.run_progress.phase == "WAIT_FOR_IDLE"]
    assert any("at most 2 s: " in message and "tasks per cpu run" in message for message in reported)
    (p50_ns,) = [m.run_progress.p50_ns for m in connection.received if m.run_progress.HasField("p50_ns")]
    assert p50_ns > 0, "the median is known before the report"
    cell = await connection.run(server.candidate("add"), attempt="a2")
    assert "WAIT_FOR_IDLE" not in [phase.phase for phase in cell.phases], "who measures nothing waits for nothing"


async def test_a_benchmark_records_the_machines_state(server: Server, join: Launch) -> None:
    _, connection = await join()
    measurement = job_pb2.Measurement(warmup=1, iterations=20, min_time_s=0.7)
    cell = await connection.run(server.candidate("conv"), measurement=measurement)
    telemetry = cell.telemetry
    assert telemetry.affinity and telemetry.series and telemetry.sampler_cpu_ns > 0
    assert telemetry.after.elapsed_ms - telemetry.before.elapsed_ms >= 600
    assert telemetry.after.memory_available_bytes > 0


async def test_without_a_measurement_a_program_runs_once(server: Server, join: Launch) -> None:
    _, connection = await join()
    cell = await connection.run(server.candidate("counter"))
    np.testing.assert_array_equal(values(server, cell.outputs)[0], expected("counter")[0])
    assert not cell.HasField("samples") and not cell.HasField("etdump") and not cell.HasField("outputs_equal")


async def test_a_program_with_state_is_judged_by_its_first_run(server: Server, join: Launch) -> None:
    _, connection = await join()
    for attempt, no_profile in (("traced", False), ("untraced", True)):
        measurement = job_pb2.Measurement(iterations=5, min_time_s=0, no_profile=no_profile)
        candidate = server.candidate("counter", writes_state=True)
        cell = await connection.run(candidate, measurement=measurement, attempt=attempt)
        np.testing.assert_array_equal(values(server, cell.outputs)[0], expected("counter")[0])
        assert cell.outputs_equal is True and cell.repeatability.outcome == report_pb2.REPEATABILITY_OUTCOME_KEEPS_STATE


async def test_a_wrong_input_is_a_user_error(server: Server, join: Launch) -> None:
    _, connection = await join()
    wrong = server.put(tensors.encode(program("add").inputs))
    connection.start("a1", server.candidate("conv", inputs=wrong), server.candidate("add", "second"), deadline_s=60)
    first, second = (await connection.result("a1")).candidates
    assert (first.error.fault, first.error.reason) == (common_pb2.FAULT_USER, "INPUT_MISMATCH")
    assert not second.HasField("error"), "the other candidates run all the same"


async def test_a_crash_is_a_program_fault_if_the_self_test_passes(server: Server, join: Launch) -> None:
    agent, connection = await join()
    connection.start("a1", server.candidate("conv"), measurement=LONG, deadline_s=60)
    await connection.phase("TIMED")
    os.kill(agent.runners()[0].pid, signal.SIGSEGV)
    struck_s = time.monotonic()
    error = (await connection.result("a1")).candidates[0].error
    assert time.monotonic() - struck_s < PROMPTLY_S
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_USER, "PROGRAM_CRASHED", "TIMED")
    assert (error.metadata["signal"], error.metadata["self_test"]) == ("SIGSEGV", "passed")
    connection.start("a2", server.candidate("add"), deadline_s=60)
    assert not (await connection.result("a2")).candidates[0].HasField("error"), "the agent serves on"


async def test_a_crash_is_a_device_fault_if_the_self_test_fails_too(server: Server, join: Launch, tmp_path: Path) -> None:
    agent, connection = await join()
    connection.start("a1", server.candidate("conv"), server.candidate("add", "second"), measurement=LONG, deadline_s=60)
    await connection.phase("TIMED")
    for loader in (tmp_path / "agent" / "cache" / "bundles").glob("*/ld-linux*"):
        loader.chmod(0o644)
    os.kill(agent.runners()[0].pid, signal.SIGBUS)
    result = await connection.result("a1")
    assert result.error.fault == common_pb2.FAULT_DEVICE
    assert [c.error.reason for c in result.candidates] == ["DEVICE_SELF_TEST_FAILED"] * 2
    assert result.error.metadata["program_error"] == "PROGRAM_CRASHED"


async def test_a_hanging_program_is_killed_at_the_deadline(server: Server, join: Launch) -> None:
    agent, connection = await join()
    # The deadline leaves a slow machine the time to be in the pass by then.
    measurement = job_pb2.Measurement(warmup=1, min_time_s=60)
    connection.start("a1", server.candidate("conv"), measurement=measurement, deadline_s=8)
    started_s = time.monotonic()
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    runner.suspend()
    error = (await connection.result("a1")).candidates[0].error
    assert 8 <= time.monotonic() - started_s < 8 + PROMPTLY_S
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_USER, "PROGRAM_TIMED_OUT", "TIMED")
    assert error.metadata["self_test"] == "passed"
    assert not runner.is_running()


async def test_a_cancelled_run_frees_the_device_within_a_second(server: Server, join: Launch) -> None:
    agent, connection = await join()
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 1.0 and len(took_s) < TRIES):  # the machine may hold up some of them
        turn, received = len(took_s), len(connection.received)
        measurement = job_pb2.Measurement(warmup=1, min_time_s=60)
        connection.start(f"long-{turn}", server.candidate("conv"), measurement=measurement, deadline_s=600)
        await connection.until(lambda m: m.run_progress.phase == "TIMED", received)
        (runner,) = agent.runners()
        cancelled_s = time.monotonic()
        connection.cancel(f"long-{turn}")
        connection.start(f"next-{turn}", server.candidate("add"), deadline_s=60)
        result = await connection.result(f"long-{turn}")
        took_s.append(time.monotonic() - cancelled_s)
        assert result.error.reason == "CANCELLED"
        assert not runner.is_running()
        (cell,) = (await connection.result(f"next-{turn}")).candidates
        assert not cell.HasField("error"), "the next run need not wait to be sent"
    assert min(took_s) < 1.0, took_s


@pytest.mark.remedy("DEVICE_BUSY", "CANCELLED", "DEVICE_UNKNOWN")
async def test_runs_that_are_not_measured_share_a_device_and_others_do_not(server: Server, join: Launch) -> None:
    _, connection = await join("--concurrent-runs", "2")
    assert connection.hello.devices[0].concurrent_runs == 2
    add = server.candidate("add")
    server.away = True  # so that runs do not end
    for attempt in ("a1", "a2"):
        connection.start(attempt, add, deadline_s=60)
    for attempt in ("a1", "a2"):
        await connection.until(lambda m, a=attempt: (m.run_progress.attempt_id, m.run_progress.phase) == (a, "UPLOAD"))
    connection.start("a3", add, deadline_s=60)
    connection.start("a4", add, measurement=SHORT, deadline_s=60)
    assert (await connection.result("a3")).error.reason == "DEVICE_BUSY", "its slots are taken"
    connection.cancel("a1")
    assert (await connection.result("a1")).error.reason == "CANCELLED"
    connection.start("a5", add, measurement=SHORT, deadline_s=60)
    for measured in ("a4", "a5"):
        assert (await connection.result(measured)).error.reason == "DEVICE_BUSY", "a measurement is alone"
    connection.start("b6", add, deadline_s=60, device_id="elsewhere")
    assert (await connection.result("b6")).error.reason == "DEVICE_UNKNOWN"
    # Once more, as the farm places it, or as its user submits it.
    connection.start("a6", add, deadline_s=60)
    server.away = False
    for attempt in ("a2", "a6"):
        (cell,) = (await connection.result(attempt)).candidates
        assert not cell.HasField("error"), cell.error
    connection.start("a7", add, measurement=SHORT, deadline_s=60)
    connection.start("a8", add, deadline_s=60)
    assert (await connection.result("a8")).error.reason == "DEVICE_BUSY", "nothing joins a measurement"
    assert not (await connection.result("a7")).candidates[0].HasField("error")


async def test_a_busy_device_refuses_and_a_known_attempt_is_not_repeated(server: Server, join: Launch) -> None:
    agent, connection = await join()
    candidate = server.candidate("conv")
    connection.start("a1", candidate, measurement=LONG, deadline_s=600)
    await connection.phase("TIMED")
    (runner,) = agent.runners()
    connection.start("a1", candidate, measurement=LONG, deadline_s=600)
    connection.start("a2", candidate, deadline_s=600)
    connection.start("a3", candidate, deadline_s=600, device_id="elsewhere")
    busy, wrong = await connection.result("a2"), await connection.result("a3")
    assert (busy.error.fault, busy.error.reason) == (common_pb2.FAULT_DEVICE, "DEVICE_BUSY")
    assert wrong.error.reason == "DEVICE_UNKNOWN"
    assert agent.runners() == [runner]
    assert not any(m.run_result.attempt_id == "a1" for m in connection.received)


async def test_an_upload_waits_for_an_unreachable_server(server: Server, join: Launch) -> None:
    _, connection = await join()
    server.away = True
    connection.start("a1", server.candidate("add"), deadline_s=60)
    async with asyncio.timeout(WAIT_S):
        await server.turned_away.wait()
    server.away = False
    (cell,) = (await connection.result("a1")).candidates
    assert cell.outputs.digest in server.blobs


async def test_an_upload_timeout_is_a_device_fault(server: Server, join: Launch) -> None:
    _, connection = await join()
    server.away = True
    # Long enough that a slow machine has run it by then.
    error = (await connection.run(server.candidate("add"), deadline_s=8)).error
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_DEVICE, "TRANSFER_TIMED_OUT", "UPLOAD")


async def test_damaged_files_never_reach_a_runner(server: Server, join: Launch) -> None:
    _, connection = await join()
    candidate = server.candidate("add")
    good = server.blobs[candidate.program.pte.digest]
    server.blobs[candidate.program.pte.digest] = good[:-1] + bytes([good[-1] ^ 1])
    error = (await connection.run(candidate)).error
    assert (error.fault, error.reason, error.stage) == (common_pb2.FAULT_FARM, "DIGEST_MISMATCH", "FETCH")
    assert server.downloads.count(candidate.program.pte.digest) == 3


async def test_cores_restrict_the_offered_cpus_and_the_programs_affinity(server: Server, join: Launch) -> None:
    core = str(min(os.sched_getaffinity(0)))
    _, connection = await join("--cores", core)
    assert connection.hello.devices[0].cores == 1
    connection.start("a1", server.candidate("add", threads=2), server.candidate("add", "second"), deadline_s=60)
    asked, default = (await connection.result("a1")).candidates
    assert (asked.threads, default.threads) == (2, 1)
    assert asked.runner.cores == default.runner.cores == core
    measurement = job_pb2.Measurement(cores="4000")
    connection.start("a2", server.candidate("add"), measurement=measurement, deadline_s=60)
    (refused,) = (await connection.result("a2")).candidates
    assert (refused.error.fault, refused.error.reason) == (common_pb2.FAULT_USER, "CORES_UNKNOWN")
