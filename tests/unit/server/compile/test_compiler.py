"""The compiler's daemon side with real workers and a real store: stages, children and their failures."""

from __future__ import annotations

from datetime import UTC, datetime

import psutil
import pytest

from etfarm.server.compile.upload_screening import Screening
from etfarm.server.jobs.cells.numerics import candidate_of
from etfarm.server.jobs.submission import Submission
from etfarm.v1 import common_pb2
from etfarm.v1.job_pb2 import Candidate, JobSpec
from etfarm.wire import recipes
from tests.support.compiling_children import INT8, LOWERED, QUANTIZED, ReceivedProgress, World, error_of, stage_names


async def test_a_recipe_without_quantization_compiles_in_a_single_child(world: World) -> None:
    received = ReceivedProgress()
    candidate = await world.model(encode="other")
    candidate.model.constant_methods["eos"].CopyFrom(await world.store.put(b"constant", "ann"))
    outcome = await world.compile(candidate, received)
    created = outcome.compilation
    assert world.ran == ["lower"]
    assert (outcome.cached, outcome.error) == (False, None)
    assert stage_names(created.stages) == LOWERED
    assert {(stage.where, stage.cached, stage.methods["encode"]) for stage in created.stages} == {
        (common_pb2.ACTOR_SERVER, False, 1.0)
    }
    assert received.stages == [(stage, ended, False) for stage in LOWERED for ended in (False, True)]
    assert received.lines == [f"lower {stage}" for stage in LOWERED]
    assert world.bytes_of(created.program.pte) == b"pte encode\nother\n|forward\n\n|constant"
    assert world.bytes_of(created.program.data["weights"]) == b"ptd"
    assert created.exported_programs["encode"] == candidate.model.methods["encode"].exported_program
    assert created.delegation["forward"].operators[0].places[0].source.line == 3
    assert (created.sizes.delegate_bytes, created.sizes.data_bytes["weights"]) == (3, 3)
    assert (created.checks[0].outputs[0].max_abs_error, created.checks[0].outputs[0].HasField("sqnr_db")) == (0.5, False)
    assert set(created.facts.methods) == {"forward", "encode", "eos"}
    assert not created.stayed_fp32
    assert not world.folders()


async def test_a_compilation_starts_again_if_its_supervisor_is_killed_in_a_stage(world: World) -> None:
    gate, received = world.gate(), ReceivedProgress()
    compiling = world.compile(await world.model(f"lower wait {gate.path}"), received)
    await received.until(LOWERED[0])
    assert world.workers.forkserver_pid is not None
    (supervisor,) = psutil.Process(world.workers.forkserver_pid).children()
    received.at[LOWERED[0]].clear()
    supervisor.kill()
    await received.until(LOWERED[0])
    gate.open()
    outcome = await compiling
    assert (outcome.error, stage_names(outcome.compilation.stages)) == (None, LOWERED)
    again = [(stage, ended, False) for stage in LOWERED for ended in (False, True)]
    assert received.stages == [(LOWERED[0], False, False), *again]


async def test_a_quantizing_recipe_lowers_the_quantized_program(world: World) -> None:
    received = ReceivedProgress()
    created = (await world.compile(await world.model("x", INT8, calibration=b"sample"), received)).compilation
    assert world.ran == ["quantize", "lower"]
    assert received.lines == [*(f"quantize {stage}" for stage in QUANTIZED), *(f"lower {stage}" for stage in LOWERED)]
    assert stage_names(created.stages) == [*QUANTIZED, *LOWERED]
    assert world.bytes_of(created.exported_programs["forward"]) == b"quantized sample\nforward\nx\n"
    assert world.bytes_of(created.program.pte) == b"pte quantized sample\nforward\nx\n"
    assert [warning.code for warning in created.warnings] == ["FEW"]
    assert created.stayed_fp32["forward"].operators[0].op == "aten.sin"


async def test_a_model_that_the_client_quantized_is_not_quantized_again(world: World) -> None:
    candidate = await world.model("x", INT8)
    for stage in QUANTIZED:
        candidate.stages_done.add(stage=stage)
    assert stage_names((await world.compile(candidate)).compilation.stages) == LOWERED
    assert world.ran == ["lower"]


async def test_a_compiled_program_is_only_inspected(world: World) -> None:
    candidate = Candidate(name="x.pte")
    candidate.program.pte.CopyFrom(await world.store.put(b"pte", "ann"))
    created = (await world.compile(candidate)).compilation
    assert world.ran == ["inspect"]
    assert (created.program.pte, list(created.facts.methods), len(created.stages)) == (candidate.program.pte, ["forward"], 0)


async def test_a_stopped_compilation_has_stage_files_but_no_program(world: World) -> None:
    created = (await world.compile(await world.model("x", INT8), stop_after="TO_EDGE_TRANSFORM_AND_LOWER")).compilation
    assert not created.HasField("program")
    assert created.stopped_after == "TO_EDGE_TRANSFORM_AND_LOWER"
    assert world.bytes_of(created.stage_files["delegation.csv"]) == b"TO_EDGE_TRANSFORM_AND_LOWER"
    assert (await world.compile(await world.model("x", INT8))).compilation.HasField("program"), "another key"


async def test_a_child_cannot_replace_its_folder(world: World) -> None:
    outcome = await world.compile(await world.model("lower move", INT8))
    assert "Device or resource busy" in error_of(outcome).message or "Permission denied" in error_of(outcome).message
    assert not outcome.lasting
    assert not outcome.compilation.HasField("program")


async def test_a_hanging_stage_times_out_and_is_not_cached(world: World) -> None:
    world.start_compiler(stage_deadline_s=3.0)  # so late that the child is in the stage
    outcome = await world.compile(await world.model("quantize hang", INT8))
    error = error_of(outcome)
    assert (error.reason, error.stage, error.metadata["clock"]) == ("CHILD_TIMED_OUT", "QUANTIZE", "stage")
    assert not outcome.lasting
    assert not world.folders()


async def test_a_missing_model_is_not_cached_as_a_failure(world: World) -> None:
    candidate = await world.model("x")
    world.lose(candidate.model.methods["forward"].exported_program)
    outcome = await world.compile(candidate)
    assert error_of(outcome).reason == "ARTIFACT_DAMAGED"
    assert not outcome.lasting


class SkippedScreening(Screening):
    async def screen_pt2(self, digest: str, project: str) -> None:
        pass


@pytest.mark.parametrize("padding", ["", "a" * 5000], ids=["small", "large"])
async def test_a_recipe_is_parsed_once_for_a_submission_and_all_of_its_cells(
    world: World, monkeypatch: pytest.MonkeyPatch, padding: str
) -> None:
    parsed = []

    def counted(text: str) -> recipes.Recipe:
        parsed.append(text)
        return original(text)

    original = recipes.from_json
    # A file that only this test has, since recipes stay parsed for the life of a process.
    operators = ", ".join(f'"aten.linear.once{index}"' for index in range(1 + len(padding) // 20))
    recipe = recipes.from_toml(f'recipe = "xnnpack_fp32"\n[edge]\npreserve_ops = [{operators}]\n').json
    monkeypatch.setattr(recipes, "from_json", counted)
    candidate = await world.model(recipe=recipe)
    submission = Submission(
        world.store,
        list,
        world.compiler.check,
        iter(map(str, range(9))).__next__,
        SkippedScreening(world.workers, world.store.path),
    )
    spec = JobSpec(candidates=[candidate])
    await submission.make(spec, owner="ann", project="default", at=datetime(2026, 1, 1, tzinfo=UTC))
    for _ in range(3):
        assert (await world.compile(candidate)).error is None
    assert candidate_of(candidate) is not None
    assert parsed == [recipe]
