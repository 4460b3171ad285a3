"""The graceful stop: what runs goes on to its end, what waits is left to the next server, and nothing new begins."""

from __future__ import annotations

import asyncio

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.v1 import common_pb2, job_pb2
from tests.support.cells import WAIT_S, World


async def states(world: World, job: job_pb2.Job) -> list[str]:
    cells = (await world.journal.get(job.id, EVERYTHING)).cells
    return [common_pb2.CellState.Name(cell.state).removeprefix("CELL_STATE_") for cell in cells]


async def test_a_running_cell_ends_with_its_report_and_a_waiting_one_stays(world: World) -> None:
    agent = await world.agent()
    running, waiting = await world.submit(), await world.submit()
    run = await agent.started()
    await world.until(waiting, model.WAITING)
    draining = asyncio.create_task(world.conductor.drain())
    await asyncio.sleep(0)
    late = await world.submit()
    assert not draining.done()
    agent.answer(run)
    async with asyncio.timeout(WAIT_S):
        await draining
    assert [*await states(world, running), *await states(world, waiting), *await states(world, late)] == [
        "SUCCEEDED", "WAITING_FOR_DEVICE", "QUEUED",
    ]  # fmt: skip
    await agent.leave()
    world = await world.restarted()
    agent = await world.agent()
    await world.conductor.resume()
    for _ in range(2):
        agent.answer(await agent.started())
        await agent.next_message()
    for job in (waiting, late):
        await world.end(job)
        assert await states(world, job) == ["SUCCEEDED"]


async def test_a_compilation_ends_and_its_cell_does_not_take_a_device(world: World) -> None:
    await world.agent()
    world.compiler.gate = asyncio.Event()
    job = await world.submit()
    await world.until(job, model.COMPILING)
    draining = asyncio.create_task(world.conductor.drain())
    await asyncio.sleep(0)
    world.compiler.gate.set()
    async with asyncio.timeout(WAIT_S):
        await draining
    assert await states(world, job) == ["WAITING_FOR_DEVICE"]
    assert (world.compiler.stopped, world.runs.busy()) == (0, {})


async def test_a_farm_without_work_drains_at_once(world: World) -> None:
    async with asyncio.timeout(WAIT_S):
        await world.conductor.drain()
    assert world.conductor.live == 0
