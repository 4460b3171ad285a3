"""The order of a cell's stages, from each state in which a server may take it up."""

from __future__ import annotations

import pytest

from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.v1.common_pb2 import Artifact, CellState
from etfarm.v1.compile_pb2 import Compilation
from etfarm.v1.job_pb2 import Candidate, Cell, Job, JobSpec, Measurement, MethodSource, Model
from etfarm.wire.errors import UserError
from etfarm.wire.samples import MAX_SAMPLES, MAX_SAMPLES_BYTES


class Recorded:
    """Stages that record their names and advance the cell as the real ones do."""

    def __init__(self, *, on_device: bool = True, fails: str = "", device_faults: int = 0) -> None:
        self.names: list[str] = []
        self._on_device = on_device
        self._fails = fails
        self._device_faults = device_faults

    def _record(self, run: CellRun, name: str, to: CellState.ValueType | None = None) -> None:
        self.names.append(name)
        if name == self._fails:
            raise UserError("It cannot be.")
        if to is not None:
            run.cell.state = to

    async def compile(self, run: CellRun) -> None:
        self._record(run, "compile", model.WAITING if self._on_device else model.SUCCEEDED)

    async def recover(self, run: CellRun) -> None:
        self._record(run, "recover")

    async def place_and_run(self, run: CellRun) -> None:
        self._device_faults -= 1
        self._record(run, "place_and_run", model.WAITING if self._device_faults >= 0 else model.ANALYZING)

    def leave(self, run: CellRun) -> None:
        self.names.append("leave")

    async def analyze(self, run: CellRun) -> None:
        self._record(run, "analyze", model.SUCCEEDED)


def run_in(state: CellState.ValueType) -> CellRun:
    return CellRun(Job(), Cell(state=state))


@pytest.mark.parametrize(
    ("state", "names"),
    [
        (model.QUEUED, ["compile", "place_and_run", "leave", "analyze"]),
        (model.COMPILING, ["compile", "place_and_run", "leave", "analyze"]),
        (model.WAITING, ["recover", "place_and_run", "leave", "analyze"]),
        (model.RUNNING, ["recover", "place_and_run", "leave", "analyze"]),
        (model.ANALYZING, ["recover", "leave", "analyze"]),
    ],
)
async def test_a_cell_goes_on_in_order_from_any_state(state: CellState.ValueType, names: list[str]) -> None:
    stages, run = Recorded(), run_in(state)
    await run.lead(stages)
    assert stages.names == names
    assert run.is_over


async def test_a_cell_without_a_device_is_over_once_it_is_compiled() -> None:
    stages = Recorded(on_device=False)
    await run_in(model.QUEUED).lead(stages)
    assert stages.names == ["compile", "leave"]


async def test_a_cell_is_placed_again_as_often_as_it_waits_again() -> None:
    stages = Recorded(device_faults=2)
    await run_in(model.QUEUED).lead(stages)
    assert stages.names == ["compile", *["place_and_run"] * 3, "leave", "analyze"]


@pytest.mark.parametrize("stage", ["compile", "place_and_run"])
async def test_a_cell_that_fails_leaves_those_that_wait_for_it(stage: str) -> None:
    stages = Recorded(fails=stage)
    with pytest.raises(UserError):
        await run_in(model.QUEUED).lead(stages)
    assert stages.names[-2:] == [stage, "leave"]


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
    run.compilation = None
    assert not run.writes_state


def test_a_ready_program_is_not_executed_on_further_samples() -> None:
    run = measured(1, 2)
    run.job.spec.candidates[0].program.SetInParent()
    run.job.spec.inputs["forward"].digest = "given"
    run.job.spec.further_inputs["forward"].samples.add(digest="further")
    assert run.inputs is not None and run.samples == []
