"""What a candidate must be to be accepted: its stages, methods, recipe, files and programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from etfarm.server.compile.screening import screen
from etfarm.server.compile.screening.errors import TruncatedProgram
from etfarm.server.jobs.candidates import MAX_SAMPLES
from etfarm.server.jobs.submission import BadJob
from etfarm.v1.common_pb2 import ACTOR_CLIENT, ACTOR_SERVER
from etfarm.v1.job_pb2 import DeviceChoice, JobSpec, Measurement
from etfarm.wire import digest, recipes
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import Kind, UserError
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.submissions import FP32, World, world

__all__ = ["world"]


async def test_the_client_s_stages_say_that_they_ran_there(world: World) -> None:
    candidate = await world.model("net", recipes.parse("xnnpack_torchao_int8da_int4w_per_channel").json)
    candidate.stages_done.add(stage="SOURCE_TRANSFORM", where=ACTOR_SERVER, cached=True, duration_ms=1)
    candidate.stages_done.add(stage="TORCH_EXPORT")
    job = await world.make(JobSpec(candidates=[candidate]))
    assert [(stage.where, stage.cached) for stage in job.spec.candidates[0].stages_done] == [(ACTOR_CLIENT, False)] * 2


Change = Callable[[JobSpec], object]


def done(*stages: str, duration_ms: float = 0.0) -> Change:
    """Return a change that calls stages of the model done."""

    def change(spec: JobSpec) -> None:
        for stage in stages:
            spec.candidates[0].stages_done.add(stage=stage, duration_ms=duration_ms)

    return change


def with_method(name: str) -> Change:
    """Return a change that adds a method to the model."""

    def change(spec: JobSpec) -> None:
        methods = spec.candidates[0].model.methods
        methods[name].CopyFrom(methods["forward"])

    return change


def with_constant(name: str) -> Change:
    """Return a change that adds a constant method to the model."""

    def change(spec: JobSpec) -> None:
        model = spec.candidates[0].model
        model.constant_methods[name].CopyFrom(model.methods["forward"].exported_program)

    return change


OPTIONS_OF_ANOTHER = recipes.from_toml('recipe = "xnnpack_fp32"\n[methods.forwrd]\npartitioners = []\n', "mine").json
EAGER = recipes.parse("xnnpack_torchao_int8da_int4w_per_channel").json
NO_PROGRAM = JobSpec(stop_after="TO_EDGE_TRANSFORM_AND_LOWER", devices=[DeviceChoice()])
REFUSED: dict[str, tuple[str, Change]] = {
    "stage_misspelled": ("BAD_STAGES", done("TO_EGDE")),
    "stage_of_another_recipe": ("BAD_STAGES", done("TORCH_EXPORT", "QUANTIZE")),
    "stage_of_the_server": ("BAD_STAGES", done("TORCH_EXPORT", "TO_EDGE")),
    "stages_without_the_export": ("BAD_STAGES", done("QUANTIZE")),
    "stage_in_negative_time": ("BAD_JOB", done("TORCH_EXPORT", duration_ms=-1.0)),
    "stage_in_nan_time": ("BAD_JOB", done("TORCH_EXPORT", duration_ms=float("nan"))),
    "stage_in_infinite_time": ("BAD_JOB", done("TORCH_EXPORT", duration_ms=float("inf"))),
    "stop_after_a_stage_of_another_recipe": ("BAD_STAGES", lambda spec: setattr(spec, "stop_after", "QUANTIZE")),
    "stop_after_a_stage_of_a_program": ("BAD_JOB", lambda s: (s.candidates.pop(0), setattr(s, "stop_after", "TORCH_EXPORT"))),
    "run_without_a_program": ("BAD_JOB", lambda spec: (spec.candidates.pop(), spec.MergeFrom(NO_PROGRAM))),
    "options_of_another_method": ("BAD_RECIPE_FIELD", lambda spec: setattr(spec.candidates[0], "recipe", OPTIONS_OF_ANOTHER)),
    "recipe_of_eager_modules": ("RECIPE_NEEDS_EAGER_MODULE", lambda spec: setattr(spec.candidates[0], "recipe", EAGER)),
    "recipe_of_a_ready_program": ("BAD_JOB", lambda spec: setattr(spec.candidates[1], "recipe", FP32)),
    "method_without_a_name": ("BAD_JOB", with_method("")),
    "method_with_a_slash": ("BAD_JOB", with_method("a/b")),
    "method_of_dots": ("BAD_JOB", with_method("..")),
    "method_with_a_long_name": ("BAD_JOB", with_method("x" * 101)),
    "method_of_many_bytes": ("BAD_JOB", with_method("\N{CJK UNIFIED IDEOGRAPH-6587}" * 50)),
    "method_and_constant": ("BAD_JOB", with_constant("forward")),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_candidate_that_cannot_be_is_refused(golden: Golden, world: World, name: str) -> None:
    reason, change = REFUSED[name]
    spec = JobSpec(candidates=[await world.model(), await world.ready()])
    change(spec)
    with golden.refuses(reason) as refused:
        await world.make(spec)
    assert refused.value.kind is Kind.INVALID_ARGUMENT


@pytest.mark.parametrize("stage", ["TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"])
async def test_a_compilation_may_stop_after_a_stage_of_its_recipe(world: World, stage: str) -> None:
    job = await world.make(JobSpec(candidates=[await world.model()], stop_after=stage))
    assert job.spec.stop_after == stage


@pytest.mark.parametrize("more", [0, 1])
async def test_a_method_has_a_most_of_calibration_samples(world: World, more: int) -> None:
    candidate = await world.model()
    sample = await world.stored(b"sample")
    candidate.model.methods["forward"].calibration.extend([sample] * (MAX_SAMPLES + more))
    if not more:
        await world.make(JobSpec(candidates=[candidate]))
        return
    with pytest.raises(BadJob, match="10001 calibration samples"):
        await world.make(JobSpec(candidates=[candidate]))


async def test_a_ready_program_is_screened_and_given_its_digest(world: World) -> None:
    candidate, data = await world.ready(), await world.stored(b"data")
    pte = candidate.program.pte
    candidate.program.data["weights"].CopyFrom(data)
    candidate.program.digest = "a lie"
    job = await world.make(JobSpec(candidates=[candidate]))
    assert job.spec.candidates[0].program.digest == digest.of_program(pte.digest, {"weights": data.digest})
    assert world.screened == [world.store.path(pte.digest)]
    assert job.cells[0].recipe_name == ""


async def test_equal_bytes_are_screened_once(world: World) -> None:
    spec = JobSpec(candidates=[await world.model("a", forward=b"same"), await world.model("b", forward=b"same")])
    await world.make(spec)
    await world.make(spec)
    assert len(world.screened) == 1


async def test_bytes_that_passed_as_a_program_are_screened_again_as_a_model(world: World) -> None:
    program = await world.ready(data=b"both")
    await world.make(JobSpec(candidates=[program]))
    await world.make(JobSpec(candidates=[await world.model(forward=b"both")]))
    assert len(world.screened) == 2


@pytest.mark.parametrize(("others", "begins"), [([], "The program has 3 bytes"), (["net"], "x.pte: The program has 3 bytes")])
async def test_of_several_models_the_one_that_is_refused_is_named(
    world: World, monkeypatch: pytest.MonkeyPatch, others: list[str], begins: str
) -> None:
    def refuse(path: Path) -> None:
        raise TruncatedProgram(9, path.stat().st_size)

    monkeypatch.setattr(screen, "screen_pte", refuse)
    program = await world.ready()
    with pytest.raises(UserError) as refused:
        await world.make(JobSpec(candidates=[*[await world.model(name) for name in others], program]))
    assert refused.value.message.startswith(begins)
    assert (refused.value.reason, refused.value.metadata["size_bytes"]) == ("TRUNCATED_PROGRAM", "3")


async def test_a_recipe_without_a_name_is_called_by_its_label(world: World) -> None:
    named = await world.model()
    unnamed = await world.model("net", recipes.from_toml('recipe = "xnnpack_fp32"\nstrict = true').json)
    for candidate in (named, unnamed):
        candidate.recipe_label = "mine"
    job = await world.make(JobSpec(candidates=[named, unnamed]))
    digest = recipes.from_json(unnamed.recipe).digest
    assert [cell.recipe_name for cell in job.cells] == ["xnnpack_fp32", f"mine [{digest[:8]}]"]


async def test_a_recipe_is_asked_for_by_name_and_a_ready_program_has_none(world: World) -> None:
    program = await world.ready()
    await world.make(JobSpec(candidates=[await world.model(), program]))
    assert world.asked == ["xnnpack_fp32"]


async def test_numerics_of_a_ready_program_are_refused_since_nothing_is_known_to_compare_them_with(
    golden: Golden, world: World
) -> None:
    program = await world.ready()
    spec = JobSpec(candidates=[program], devices=[DeviceChoice()], measurement=Measurement(numerics=True))
    with golden.refuses("BAD_JOB") as refused:
        await world.make(spec)
    assert refused.value.remedy.startswith("Give the .pt2 or the model itself")
    spec.candidates[0].CopyFrom(await world.model())
    assert (await world.make(spec)).spec.measurement.numerics


@pytest.mark.parametrize("where", ["model", "calibration", "constant", "inputs", "pte", "data"])
async def test_every_artifact_that_a_spec_names_must_be_stored(world: World, where: str) -> None:
    absent = artifact_of(b"never sent")
    spec = JobSpec(candidates=[await world.model()])
    method = spec.candidates[0].model.methods["forward"]
    if where == "model":
        method.exported_program.CopyFrom(absent)
    elif where == "calibration":
        method.calibration.append(absent)
    elif where == "constant":
        spec.candidates[0].model.constant_methods["eos"].CopyFrom(absent)
    elif where == "inputs":
        spec.inputs["forward"].CopyFrom(absent)
    else:
        candidate = spec.candidates.add(name="x.pte")
        candidate.program.pte.CopyFrom(absent if where == "pte" else await world.stored(b"pte"))
        if where == "data":
            candidate.program.data["w"].CopyFrom(absent)
    with refuses("ARTIFACT_MISSING") as refused:
        await world.make(spec)
    assert refused.value.metadata["digest"] == absent.digest
    assert refused.value.kind is Kind.FAILED_PRECONDITION
