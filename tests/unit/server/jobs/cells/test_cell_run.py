"""What a cell's run sends to the device beside its program: samples, calls, whether there is state, and a time limit."""

from __future__ import annotations

from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.dispatch import deadline_s
from etfarm.v1.common_pb2 import Artifact
from etfarm.v1.compile_pb2 import Compilation
from etfarm.v1.job_pb2 import Candidate, Cell, Job, JobSpec, Measurement, MethodSource, Model
from etfarm.wire.errors import Fault, error_of
from etfarm.wire.samples import MAX_SAMPLES, MAX_SAMPLES_BYTES


def measured(*calibration_bytes: int) -> CellRun:
    """Return the run of a model with an example input of one byte and calibration samples of these sizes."""
    method = MethodSource(calibration=[Artifact(digest=str(at), size_bytes=size) for at, size in enumerate(calibration_bytes)])
    job = Job(spec=JobSpec(measurement=Measurement(), candidates=[Candidate(model=Model(methods={"forward": method}))]))
    compilation = Compilation(example_inputs={"forward": Artifact(digest="example", size_bytes=1)})
    return CellRun(job, Cell(method="forward"), compilation=compilation)


def test_further_samples_have_a_total_size() -> None:
    assert [sample.digest for sample in measured(1, 2, 3).samples] == ["0", "1", "2"]
    assert len(measured(*range(1, 100)).samples) == MAX_SAMPLES - 1
    assert [sample.digest for sample in measured(9, MAX_SAMPLES_BYTES - 10, 1).samples] == ["0", "1"]


def test_the_calls_of_a_measured_program_have_inputs() -> None:
    run, examples = measured(), Artifact(digest="example", size_bytes=1)
    assert run.calls == [], "no method shares state"
    model, compiled = run.candidate.model, run.compilation
    assert compiled is not None
    model.methods["a"].SetInParent()
    compiled.shared_buffers.append("state")
    assert run.calls == [], "a has no example inputs, with which a compilation warns"
    compiled.example_inputs["a"].digest = "a"
    assert [(call.method, call.inputs.digest) for call in run.calls] == [("a", "a"), ("forward", "example")]
    model.calls.add(method="forward").inputs.digest = "own"
    model.calls.add(method="forward")
    assert [(call.method, call.inputs) for call in run.calls] == [("forward", Artifact(digest="own")), ("forward", examples)]
    run.job.spec.measurement.generation.SetInParent()
    assert run.calls == []


def test_the_agent_learns_which_methods_write_to_state() -> None:
    run = measured()
    assert run.compilation is not None and not run.writes_state
    run.compilation.stateful_methods.append("forward")
    assert run.writes_state
    run.compilation.ClearField("stateful_methods")
    run.candidate.program.SetInParent()
    assert run.writes_state, "a program that came ready may write to state"


def test_only_the_repeated_executions_of_a_measured_program_advance_its_state() -> None:
    log = "KernelCall failed at instruction 0:1 in operator aten::index_put.out: 0x12"
    error = error_of(Fault.USER, "PROGRAM_FAILED", "It failed.", "", metadata={"log": log})
    run, state = measured(), "Each execution of a benchmark, warm-up included, advances the program's state"
    assert run.compilation is not None
    run.compilation.located_operators["forward"].by_instruction[1] = "aten::index_put at net.py:3"
    assert state not in run.locate(error, repeated=True).remedy
    run.compilation.stateful_methods.append("forward")
    assert state in run.locate(error, repeated=True).remedy and state not in run.locate(error).remedy
    run.job.spec.ClearField("measurement")
    assert state not in run.locate(error, repeated=True).remedy


def test_a_ready_program_is_not_executed_on_further_samples() -> None:
    run = measured(1, 2)
    run.job.spec.candidates[0].program.SetInParent()
    run.job.spec.inputs["forward"].digest = "given"
    run.job.spec.further_inputs["forward"].samples.add(digest="further")
    assert run.inputs is not None and run.samples == []


def test_the_default_limit_grows_with_the_runs_and_the_candidates() -> None:
    job = Job()
    assert (deadline_s(job, 1), deadline_s(job, 3)) == (600, 1800)
    job.spec.measurement.repeat = 5
    assert deadline_s(job, 1) == 600 + 4 * 120
    job.spec.measurement.min_time_s = 300
    assert deadline_s(job, 1) == 600 + 4 * (80 + 60), "without a limit a timed pass ends after 60 s"
    job.spec.measurement.max_time_s = 300
    assert deadline_s(job, 1) == 600 + 4 * (80 + 300)
    job.spec.measurement.min_time_s = job.spec.measurement.max_time_s = 1e7
    assert deadline_s(job, 1) == 600 + 86_400, "a program that hangs occupies its device for a day at most"
    job.spec.timeout_s = 30
    assert deadline_s(job, 1) == 30
