"""Compilations that several projects share, and what each project can see."""

from __future__ import annotations

import pytest

from etfarm.server.access.scope import Scope
from etfarm.server.compile.cache import CompilationNotFound, artifacts_of
from tests.support.compiling_children import INT8, World


@pytest.mark.remedy("COMPILATION_NOT_FOUND")
async def test_a_project_holds_the_files_of_a_compilation_that_another_requested_first(world: World) -> None:
    vision, audio = Scope(frozenset({"vision"})), Scope(frozenset({"audio"}))
    first = (await world.compile(await world.model("x", INT8), project="vision")).compilation
    files = [artifact.digest for artifact in artifacts_of(first)]
    assert files
    assert await world.store.missing(files, "vision") == []
    assert await world.store.missing(files, "audio") == files
    assert await world.compiler.get_visible(first.key, vision) == first
    with pytest.raises(CompilationNotFound) as refused:
        await world.compiler.get_visible(first.key, audio)
    with pytest.raises(CompilationNotFound) as absent:
        await world.compiler.get_visible("0" * 64, audio)
    assert str(refused.value).replace(first.key[:12], "K") == str(absent.value).replace("0" * 12, "K")
    assert (await world.compile(await world.model("x", INT8), project="audio")).cached
    assert await world.store.missing(files, "audio") == []
    assert await world.compiler.get_visible(first.key, audio) == first


async def test_a_compilation_that_another_project_replaced_stays_readable(world: World) -> None:
    await world.compile(await world.model("x", INT8), project="vision")
    other = (await world.compile(await world.model("x", INT8), project="audio", fresh=True)).compilation
    created = await world.compiler.get_visible(other.key, Scope(frozenset({"vision"})))
    assert created == other
    assert await world.store.missing([artifact.digest for artifact in artifacts_of(created)], "vision") == []


async def test_compiling_children_do_not_receive_the_models_name(world: World) -> None:
    candidate = await world.model("quantize refuse", INT8)
    candidate.name = candidate.model.name = "the-name-that-vision-gave"
    await world.compile(candidate, project="vision")
    assert world.workers.requests and "the-name" not in "".join(world.workers.requests)
    again = await world.compile(await world.model("quantize refuse", INT8), project="audio")
    assert again.cached and again.error is not None
    assert (await world.compiler.get_visible(again.compilation.key, Scope(frozenset({"audio"})))).HasField("error")
