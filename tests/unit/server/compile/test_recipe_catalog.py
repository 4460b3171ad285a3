"""Recipes whose tools or plug-ins the server has or lacks."""

from __future__ import annotations

from etfarm.wire import recipes
from tests.support.compiling_children import LOWERED, QUANTIZED, World, error_of, stage_names
from tests.support.refusals import refuses


async def test_a_recipe_with_missing_tools_is_refused_by_name(world: World) -> None:
    coreml = recipes.parse("coreml_fp16")
    with refuses("RECIPE_UNAVAILABLE", match="coremltools"):
        await world.compiler.check(coreml)
    world.start_compiler()
    outcome = await world.compile(await world.model("x", coreml.json))
    assert error_of(outcome).reason == "RECIPE_UNAVAILABLE"
    assert not outcome.lasting


async def test_a_recipe_without_requirements_does_not_list_recipes_first(world: World) -> None:
    await world.compile(await world.model("x"))
    assert world.workers.ran == ["lower"]


async def test_an_unknown_plug_in_is_refused_with_the_installed_ones(world: World) -> None:
    with refuses("UNKNOWN_RECIPE", match=r"acme\.plain"):
        await world.compiler.check(recipes.parse("acme.plane"))
    await world.compiler.check(recipes.parse("acme.plain"))
    replaced = recipes.from_toml('recipe = "portable"\n[replace]\nTO_EXECUTORCH = "acme.stage"\n')
    with refuses("UNKNOWN_STAGE", match=r"acme\.stage"):
        await world.compiler.check(replaced)


async def test_the_server_knows_whether_a_plug_ins_recipe_quantizes(world: World) -> None:
    created = (await world.compile(await world.model("x", recipes.parse("acme.static").json))).compilation
    assert stage_names(created.stages) == [*QUANTIZED, *LOWERED]
    plain = (await world.compile(await world.model("x", recipes.parse("acme.plain").json))).compilation
    assert stage_names(plain.stages) == LOWERED
