"""Recipes whose tools or plug-ins the server has or lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.wire import recipes
from tests.support.compiling_children import LOWERED, QUANTIZED, World, error_of, stage_names
from tests.support.refusals import refuses


@pytest.mark.remedy("RECIPE_UNAVAILABLE")
async def test_a_recipe_with_missing_tools_is_refused_by_name(world: World) -> None:
    coreml = recipes.parse("coreml_fp16")
    with refuses("RECIPE_UNAVAILABLE", match="coremltools"):
        await world.compiler.check(coreml)
    world.start_compiler()
    outcome = await world.compile(await world.model("x", coreml.json))
    assert error_of(outcome).reason == "RECIPE_UNAVAILABLE"
    assert not outcome.lasting
    await world.compiler.check(recipes.parse("xnnpack_fp32"))


async def test_a_recipe_without_requirements_does_not_list_recipes_first(world: World) -> None:
    await world.compile(await world.model("x"))
    assert world.workers.ran == ["lower"]


@pytest.mark.remedy("UNKNOWN_STAGE")
async def test_an_unknown_plug_in_is_refused_with_the_installed_ones(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refuses("UNKNOWN_RECIPE", match=r"acme\.plain"):
        await world.compiler.check(recipes.parse("acme.plane"))
    await world.compiler.check(recipes.parse("acme.plain"))
    replaced = recipes.from_toml('recipe = "portable"\n[replace]\nTO_EXECUTORCH = "acme.stage"\n')
    with refuses("UNKNOWN_STAGE", match=r"acme\.stage"):
        await world.compiler.check(replaced)
    installed = tmp_path / "acme_stage-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_stage\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[etfarm.stages]\nacme.stage = acme:stage\n")
    monkeypatch.syspath_prepend(tmp_path)
    await world.compiler.check(replaced)


async def test_the_server_knows_whether_a_plug_ins_recipe_quantizes(world: World) -> None:
    created = (await world.compile(await world.model("x", recipes.parse("acme.static").json))).compilation
    assert stage_names(created.stages) == [*QUANTIZED, *LOWERED]
    plain = (await world.compile(await world.model("x", recipes.parse("acme.plain").json))).compilation
    assert stage_names(plain.stages) == LOWERED
