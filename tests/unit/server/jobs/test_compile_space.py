"""Compilations on a full disk: they wait, say why, and begin by themselves once space is free."""

from __future__ import annotations

import asyncio
from pathlib import Path

from etfarm.server.artifacts.room import Room
from tests.support.cells import WAIT_S, World


async def test_a_compilation_waits_until_the_disk_has_space(world: World, tmp_path: Path) -> None:
    free = 10
    world.store.room = Room(tmp_path, 10, 100, free=lambda _: free)
    job = await world.submit(on_device=False)
    async with asyncio.timeout(WAIT_S):
        async for event in world.journal.watch(job.id, 0):
            if event.progress.phase == "WAIT_FOR_ROOM":
                break
    assert event.progress.message == "the server's disk is full: 10 bytes are free"
    assert world.compiler.calls == 0
    free = 1000
    states, (report,) = await world.end(job)
    assert (states, world.compiler.calls) == (["COMPILING", "SUCCEEDED"], 1)
    assert report.HasField("compile") and not report.HasField("attempt")
