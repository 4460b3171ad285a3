"""Concurrent requests for equal compilations: sharing, progress and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from etfarm.server.artifacts.store import Store
from etfarm.server.compile.cache import Cache, CompilationNotFound
from etfarm.server.state.engine import Database
from etfarm.v1 import compile_pb2
from tests.support.compiling_children import INT8, LOWERED, PLANNED, WAIT_S, ReceivedProgress, World


class HeldCache(Cache):
    """A cache that keeps its first answer until `answered`."""

    def __init__(self, store: Store, database: Database) -> None:
        super().__init__(store, database)
        self.asked, self.answered = asyncio.Event(), asyncio.Event()

    async def compilation(self, key: str) -> compile_pb2.Compilation | None:
        known = await super().compilation(key)
        if not self.asked.is_set():
            self.asked.set()
            await self.answered.wait()
        return known


@pytest.mark.parametrize("fresh", [False, True])
async def test_concurrent_equal_requests_share_a_compilation_and_its_progress(world: World, fresh: bool) -> None:
    gate = world.gate()
    candidate = await world.model(f"lower wait {gate.path}")
    early, late = ReceivedProgress(), ReceivedProgress()
    first = world.compile(candidate, early, fresh=fresh)
    await early.until(LOWERED[0])
    second = world.compile(candidate, late, fresh=fresh)
    await late.until(LOWERED[0])
    assert late.stages == [(LOWERED[0], False, False)], "a late caller receives the stage at once"
    gate.open()
    early_outcome, late_outcome = await asyncio.gather(first, second)
    assert early_outcome.compilation == late_outcome.compilation
    assert world.ran == ["lower"]
    assert late.stages == early.stages
    assert late.lines[-1] == "lower TO_EXECUTORCH"


async def test_a_cache_lookup_that_races_with_a_compilation_uses_its_result(world: World) -> None:
    candidate, cache = await world.model("x"), HeldCache(world.store, world.database)
    world.start_compiler(cache=cache)
    late = world.compile(candidate)
    await cache.asked.wait()
    first = await world.compile(candidate)
    cache.answered.set()
    assert ((await late).compilation, (await late).cached) == (first.compilation, True)
    assert world.ran == ["lower"]


async def test_a_fresh_request_does_not_join_a_cached_compilation(world: World) -> None:
    await world.compile(await world.model("x", INT8))
    gate = world.gate()
    candidate = await world.model(f"lower wait {gate.path}", INT8)
    received = ReceivedProgress()
    first = world.compile(candidate, received)
    await received.until(LOWERED[0])
    second = world.compile(candidate, again := ReceivedProgress(), fresh=True)
    await again.until(LOWERED[0])
    gate.open()
    await asyncio.gather(first, second)
    assert world.ran[2:] == ["quantize", "lower"] * 2


async def test_a_shared_quantization_continues_after_one_caller_cancels(world: World) -> None:
    gate = world.gate()
    mine, theirs = ReceivedProgress(), ReceivedProgress()
    first = world.compile(await world.model(f"quantize wait {gate.path}", INT8), mine)
    await mine.until("QUANTIZE")
    second = world.compile(await world.model(f"quantize wait {gate.path}", PLANNED), theirs)
    await theirs.until("QUANTIZE")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.open()
    async with asyncio.timeout(WAIT_S):
        outcome = await second
    assert outcome.error is None
    assert world.ran == ["quantize", "lower"]
    assert mine.stages == [("QUANTIZE", False, False)]


@pytest.mark.parametrize("task", ["quantize", "lower"])
async def test_the_last_cancellation_ends_the_child_and_removes_its_files(world: World, task: str) -> None:
    received, candidate = ReceivedProgress(), await world.model(f"{task} hang", INT8)
    waiting = [world.compile(candidate, received), world.compile(candidate)]
    await received.until("QUANTIZE" if task == "quantize" else LOWERED[0])
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert len(world.folders()) == 1, "the second caller still waits"
    async with asyncio.timeout(WAIT_S):
        waiting[1].cancel()
        await asyncio.wait([waiting[1]])
    assert not world.folders()
    assert not world.compiler.in_progress
    with pytest.raises(CompilationNotFound):
        await world.compiler.get(received.stages[0][0])
