"""What a candidate must be to be accepted: its stages, methods, recipe, files and programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.server.compile.screening import screen
from etfarm.server.compile.screening.errors import TruncatedProgram
from etfarm.server.jobs.candidates import MAX_SAMPLES
from etfarm.server.jobs.submission import BadJob
from etfarm.v1.common_pb2 import ACTOR_CLIENT, ACTOR_SERVER
from etfarm.v1.job_pb2 import Candidate, DeviceChoice, JobSpec, Measurement
from etfarm.wire import digest, recipes
from etfarm.wire.chunks import artifact_of
from etfarm.wire.errors import Kind, UserError
from tests.support.golden import Golden
from tests.support.refusals import refuses
from tests.support.submissions import FP32, World, world

pytestmark = pytest.mark.usefixtures("each_database")

__all__ = ["world"]


async def test_the_client_s_stages_say_that_they_ran_there(world: World) -> None:
    candidate = await world.model("net", recipes.parse("xnnpack_torchao_int8da_int4w_per_channel").json)
    candidate.stages_done.add(stage="SOURCE_TRANSFORM", where=ACTOR_SERVER, cached=True, duration_ms=1)
    candidate.stages_done.add(stage="TORCH_EXPORT")
    job = await world.make(JobSpec(candidates=[candidate]))
    assert [(stage.where, stage.cached) for stage in job.spec.candidates[0].stages_done] == [(ACTOR_CLIENT, False)] * 2


@pytest.mark.parametrize(
    "done",
    [
        ["TO_EGDE"],
        ["TORCH_EXPORT", "QUANTIZE"],
        ["TORCH_EXPORT", "TO_EDGE"],
        ["QUANTIZE"],
    ],
)
async def test_stages_that_cannot_have_been_done_are_refused(golden: Golden, world: World, done: list[str]) -> None:
    candidate = await world.model()
    for stage in done:
        candidate.stages_done.add(stage=stage)
    with refuses("BAD_STAGES") as refused:
        await world.make(JobSpec(candidates=[candidate]))
    golden.check(refused.value)


@pytest.mark.parametrize("duration_ms", [-1.0, float("nan"), float("inf")])
async def test_a_stage_that_took_no_time_that_there_is_is_refused(golden: Golden, world: World, duration_ms: float) -> None:
    candidate = await world.model()
    candidate.stages_done.add(stage="TORCH_EXPORT", duration_ms=duration_ms)
    with pytest.raises(BadJob) as refused:
        await world.make(JobSpec(candidates=[candidate]))
    golden.check(refused.value)


@pytest.mark.parametrize("stage", ["TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"])
async def test_a_compilation_may_stop_after_a_stage_of_its_recipe(world: World, stage: str) -> None:
    job = await world.make(JobSpec(candidates=[await world.model()], stop_after=stage))
    assert job.spec.stop_after == stage


async def test_a_compilation_cannot_stop_after_a_stage_that_its_recipe_does_not_have(golden: Golden, world: World) -> None:
    with refuses("BAD_STAGES") as refused:
        await world.make(JobSpec(candidates=[await world.model()], stop_after="QUANTIZE"))
    golden.check(refused.value)


async def test_what_stops_before_there_is_a_program_cannot_run(golden: Golden, world: World) -> None:
    spec = JobSpec(candidates=[await world.model()], stop_after="TO_EDGE_TRANSFORM_AND_LOWER", devices=[DeviceChoice()])
    with pytest.raises(BadJob) as refused:
        await world.make(spec)
    golden.check(refused.value)


async def test_a_ready_program_has_no_stages_to_stop_after(golden: Golden, world: World) -> None:
    candidate = Candidate(name="x.pte")
    candidate.program.pte.CopyFrom(await world.stored(b"pte"))
    with pytest.raises(BadJob) as refused:
        await world.make(JobSpec(candidates=[candidate], stop_after="TORCH_EXPORT"))
    golden.check(refused.value)


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


async def test_a_recipe_s_options_for_a_method_that_the_model_does_not_have_are_refused(golden: Golden, world: World) -> None:
    recipe = recipes.from_toml('recipe = "xnnpack_fp32"\n[methods.decodr]\npartitioners = []\n', "mine").json
    candidate = await world.model("net", recipe, encode=b"e", decoder=b"d")
    with refuses("BAD_RECIPE_FIELD") as refused:
        await world.make(JobSpec(candidates=[candidate]))
    golden.check(refused.value)


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 101, "\N{CJK UNIFIED IDEOGRAPH-6587}" * 50])
async def test_a_method_s_name_is_an_identifier(golden: Golden, world: World, name: str) -> None:
    with pytest.raises(BadJob) as refused:
        await world.make(JobSpec(candidates=[await world.model("net", **{name: b"x"})]))
    golden.check(refused.value)


async def test_a_constant_method_cannot_have_a_method_s_name(golden: Golden, world: World) -> None:
    candidate = await world.model()
    candidate.model.constant_methods["forward"].CopyFrom(await world.stored(b"constant"))
    with pytest.raises(BadJob) as refused:
        await world.make(JobSpec(candidates=[candidate]))
    golden.check(refused.value)


async def test_a_ready_program_is_screened_and_given_its_digest(world: World) -> None:
    pte, data = await world.stored(b"pte"), await world.stored(b"data")
    candidate = Candidate(name="x.pte")
    candidate.program.pte.CopyFrom(pte)
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
    program = Candidate(name="x.pte")
    program.program.pte.CopyFrom(await world.stored(b"both"))
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
    program = Candidate(name="x.pte")
    program.program.pte.CopyFrom(await world.stored(b"pte"))
    with pytest.raises(UserError) as refused:
        await world.make(JobSpec(candidates=[*[await world.model(name) for name in others], program]))
    assert refused.value.message.startswith(begins)
    assert (refused.value.reason, refused.value.metadata["size_bytes"]) == ("TRUNCATED_PROGRAM", "3")


async def test_a_recipe_that_needs_modules_is_refused_before_it_compiles_to_fp32(golden: Golden, world: World) -> None:
    recipe = recipes.parse("xnnpack_torchao_int8da_int4w_per_channel").json
    with refuses("RECIPE_NEEDS_EAGER_MODULE") as refused:
        await world.make(JobSpec(candidates=[await world.model("net", recipe)]))
    golden.check(refused.value)
    assert refused.value.reason == "RECIPE_NEEDS_EAGER_MODULE"
    assert refused.value.kind is Kind.INVALID_ARGUMENT


async def test_a_recipe_without_a_name_is_called_by_its_label(world: World) -> None:
    named = await world.model()
    unnamed = await world.model("net", recipes.from_toml('recipe = "xnnpack_fp32"\nstrict = true').json)
    for candidate in (named, unnamed):
        candidate.recipe_label = "mine"
    job = await world.make(JobSpec(candidates=[named, unnamed]))
    digest = recipes.from_json(unnamed.recipe).digest
    assert [cell.recipe_name for cell in job.cells] == ["xnnpack_fp32", f"mine [{digest[:8]}]"]


async def test_a_recipe_is_asked_for_by_name_and_a_ready_program_has_none(world: World) -> None:
    program = Candidate(name="x.pte")
    program.program.pte.CopyFrom(await world.stored(b"pte"))
    await world.make(JobSpec(candidates=[await world.model(), program]))
    assert world.asked == ["xnnpack_fp32"]


async def test_a_recipe_for_a_ready_program_is_refused(golden: Golden, world: World) -> None:
    candidate = Candidate(name="x.pte", recipe=FP32)
    candidate.program.pte.CopyFrom(await world.stored(b"pte"))
    with pytest.raises(BadJob) as refused:
        await world.make(JobSpec(candidates=[candidate]))
    golden.check(refused.value)


async def test_numerics_of_a_ready_program_are_refused_since_nothing_is_known_to_compare_them_with(
    golden: Golden, world: World
) -> None:
    program = Candidate(name="x.pte")
    program.program.pte.CopyFrom(await world.stored(b"pte"))
    spec = JobSpec(candidates=[program], devices=[DeviceChoice()], measurement=Measurement(numerics=True))
    with pytest.raises(BadJob) as refused:
        await world.make(spec)
    golden.check(refused.value)
    assert refused.value.remedy.startswith("Give the .pt2 or the model itself")
    spec.candidates[0].CopyFrom(await world.model())
    assert (await world.make(spec)).spec.measurement.numerics


async def test_an_unknown_recipe_says_what_there_is(world: World) -> None:
    with refuses("UNKNOWN_RECIPE"):
        await world.make(JobSpec(candidates=[await world.model("net", '{"recipe":"nothing"}')]))


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
