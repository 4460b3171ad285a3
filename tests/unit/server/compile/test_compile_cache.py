"""Compilations and failures that the cache answers, and those that it never keeps."""

from __future__ import annotations

import pytest
from sqlalchemy import Table, select, update

from etfarm.server.compile.cache import CompilationNotFound, artifacts_of
from etfarm.server.jobs.records.verification import find_damaged
from etfarm.server.state import schema
from tests.support.compiling_children import INT8, LOWERED, PLANNED, QUANTIZED, ReceivedProgress, World, error_of, stage_names


async def test_an_equal_compilation_comes_from_the_cache(world: World) -> None:
    first = await world.compile(await world.model("x", INT8))
    again = await world.compile(await world.model("x", INT8))
    assert again.cached
    assert again.compilation == first.compilation
    assert world.ran == ["quantize", "lower"]


async def test_a_cached_program_with_a_missing_file_is_compiled_again(world: World) -> None:
    first = (await world.compile(await world.model("x", INT8))).compilation
    world.lose(first.program.data["weights"])
    assert not (await world.compile(await world.model("x", INT8))).cached
    assert world.ran == ["quantize", "lower", "lower"]


async def test_recipes_with_equal_quantization_share_its_stages(world: World) -> None:
    await world.compile(await world.model("x", INT8))
    received = ReceivedProgress()
    outcome = await world.compile(await world.model("x", PLANNED), received)
    assert world.ran == ["quantize", "lower", "lower"]
    assert not outcome.cached
    assert [(stage.stage, stage.cached) for stage in outcome.compilation.stages] == [
        *((stage, True) for stage in QUANTIZED),
        *((stage, False) for stage in LOWERED),
    ]
    assert outcome.compilation.stages[0].duration_ms == 1.5, "as long as it took then"
    assert received.stages[:2] == [(stage, True, True) for stage in QUANTIZED]
    assert [warning.code for warning in outcome.compilation.warnings] == ["FEW"]


async def test_a_shared_quantization_with_a_missing_file_runs_again(world: World) -> None:
    first = (await world.compile(await world.model("x", INT8))).compilation
    world.lose(first.exported_programs["forward"])
    assert (await world.compile(await world.model("x", PLANNED))).error is None
    assert world.ran == ["quantize", "lower", "quantize", "lower"]


async def test_a_fresh_compilation_ignores_the_cache(world: World) -> None:
    await world.compile(await world.model("x", INT8))
    again = await world.compile(await world.model("x", INT8), fresh=True)
    assert world.ran == ["quantize", "lower"] * 2
    assert not again.cached
    assert not any(stage.cached for stage in again.compilation.stages)


@pytest.mark.parametrize(("task", "ended"), [("quantize", ["QUANTIZE"]), ("lower", [*QUANTIZED, "TO_EDGE_TRANSFORM_AND_LOWER"])])
async def test_a_cached_failure_is_returned_without_a_child(world: World, task: str, ended: list[str]) -> None:
    candidate = await world.model(f"{task} refuse", INT8)
    first = await world.compile(candidate)
    error = error_of(first)
    assert (error.reason, error.remedy, first.cached) == ("STAGE_FAILED", "Change it.", False)
    assert error.stage == ("TORCH_EXPORT" if task == "quantize" else "TO_EXECUTORCH")
    assert stage_names(first.compilation.stages) == ended
    children = list(world.ran)
    again = await world.compile(candidate)
    assert world.ran == children
    assert again.cached
    assert error_of(again).remedy == "Change it."
    assert error_of(again).metadata["cached"] == "true"
    assert stage_names(again.compilation.stages) == ended
    assert (await world.compiler.get(again.compilation.key)).error.remedy == "Change it."
    await world.compile(candidate, fresh=True)
    assert world.ran == children * 2


@pytest.mark.parametrize("task", ["quantize", "lower"])
async def test_a_cached_failure_repeats_the_printed_lines(world: World, task: str) -> None:
    refused = await world.model(f"{task} refuse", INT8)
    await world.compile(refused)
    planned = await world.model(f"{task} refuse", PLANNED)
    for candidate in [refused] if task == "lower" else [refused, planned]:
        received = ReceivedProgress()
        outcome = await world.compile(candidate, received)
        stage = "TORCH_EXPORT" if task == "quantize" else "TO_EXECUTORCH"
        assert outcome.cached
        assert received.lines[-1] == f"{task} {stage}" and "failed with this error" in received.lines[0]
    fine, received = await world.model("x"), ReceivedProgress()
    await world.compile(fine)
    await world.compile(fine, received)
    assert not received.lines


async def test_a_failure_of_shared_stages_is_cached_for_other_recipes(world: World) -> None:
    await world.compile(await world.model("quantize refuse", INT8))
    other = await world.compile(await world.model("quantize refuse", PLANNED))
    assert world.ran == ["quantize"]
    assert other.cached and error_of(other).metadata["cached"] == "true"
    assert [(stage.stage, stage.cached) for stage in other.compilation.stages] == [("QUANTIZE", True)]


@pytest.mark.parametrize(("orders", "reason"), [("lower die", "COMPILER_CRASHED"), ("lower escape", "BAD_WORKER_ANSWER")])
async def test_transient_failures_are_not_cached(world: World, orders: str, reason: str) -> None:
    candidate = await world.model(orders)
    first = await world.compile(candidate)
    assert error_of(first).reason == reason
    with pytest.raises(CompilationNotFound):
        await world.compiler.get(first.compilation.key)
    assert not (await world.compile(candidate)).cached
    assert world.ran == ["lower", "lower"]


async def test_a_failure_does_not_replace_a_cached_program(world: World) -> None:
    good = (await world.compile(await world.model("x"))).compilation
    bad = type(good)(key=good.key)
    bad.error.reason = "STAGE_FAILED"
    await world.cache.keep_compilation(bad)
    assert await world.compiler.get(good.key) == good
    for artifact in artifacts_of(good):
        world.lose(artifact)
    await world.cache.keep_compilation(bad)
    assert await world.compiler.get(good.key) == bad


@pytest.mark.parametrize("start", [True, False], ids=["unreadable", "another message"])
@pytest.mark.parametrize(("table", "ran"), [(schema.compilations, ["lower"]), (schema.stage_results, ["quantize", "lower"])])
async def test_what_is_damaged_in_the_database_is_compiled_again(world: World, table: Table, ran: list[str], start: bool) -> None:
    first = await world.compile(await world.model("x", INT8))
    before = list(world.ran)
    row = await world.database.read(lambda connection: connection.execute(select(table)).one())
    body = b"\xff" * 4 + row.body[4:] if start else row.body[:-20] + bytes([row.body[-20] ^ 1]) + row.body[-19:]
    await world.database.write(lambda connection: connection.execute(update(table).values(body=body)))
    what = "the compilation" if table is schema.compilations else "the shared stages"
    assert [name async for part in find_damaged(world.database) for name in part] == [f"{what} {row.key}"]
    again = await world.compile(await world.model("x", INT8 if table is schema.compilations else PLANNED))
    assert again.error is None and world.ran[len(before) :] == ran
    assert table is schema.stage_results or again.compilation.program == first.compilation.program
    assert [name async for part in find_damaged(world.database) for name in part] == []
