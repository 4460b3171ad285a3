"""Watches of all jobs: the live ones first, then each change, and a new snapshot for who reads too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from sqlalchemy import Connection

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.jobs import model
from etfarm.server.jobs.records import farm_watch
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Cell, JobChange, JobEvent, JobSpec, JobState, Progress
from tests.support.jobs import JournalWorld

WAIT_S = 60.0
Changes = AsyncGenerator[JobChange]


@pytest.fixture
def world(database: Database) -> JournalWorld:
    return JournalWorld(database)


async def following(changes: Changes) -> JobChange:
    async with asyncio.timeout(WAIT_S):
        return await anext(changes)


async def snapshot(changes: Changes) -> list[str]:
    assert (await following(changes)).snapshot_begins
    return await rest_of_snapshot(changes)


async def rest_of_snapshot(changes: Changes) -> list[str]:
    ids = []
    while not (change := await following(changes)).snapshot_complete:
        assert change.job.cells and not change.job.HasField("spec")
        ids.append(change.job_id)
    return ids


async def test_the_live_jobs_come_first_and_then_each_change(world: JournalWorld) -> None:
    ended, live = await world.submit("ended"), await world.submit("live")
    await world.step(ended.cells[0], model.COMPILING, model.FAILED)
    changes = world.journal.farm.changes(EVERYTHING)
    assert await snapshot(changes) == ["live"]
    await world.submit("new", 2, name="new")
    change = await following(changes)
    assert (change.job_id, change.job.name, len(change.job.cells)) == ("new", "new", 2)
    assert change.job_state == JobState.JOB_STATE_QUEUED
    cell = await world.step(live.cells[0], model.COMPILING)
    change = await following(changes)
    assert (change.job_id, change.cell.state, change.cell.version) == ("live", model.COMPILING, 2)
    assert change.job_state == JobState.JOB_STATE_RUNNING
    await world.step(cell, model.SUCCEEDED)
    assert (await following(changes)).cell.state == model.SUCCEEDED
    change = await following(changes)
    assert (change.job.id, change.job_state) == ("live", JobState.JOB_STATE_SUCCEEDED)


async def test_a_wait_at_the_server_is_a_change_and_in_the_next_snapshot(world: JournalWorld) -> None:
    cell = await world.step((await world.submit("a")).cells[0], model.COMPILING)
    changes = world.journal.farm.changes(EVERYTHING)
    await snapshot(changes)
    for phase in ("WAIT_FOR_WORKER", "WAIT_FOR_OTHERS", "COMPILE", "TORCH_EXPORT", "WAIT_FOR_ROOM"):
        world.announcer.announce("a", JobEvent(progress=Progress(cell_id=cell.id, phase=phase)))
        if phase not in ("WAIT_FOR_OTHERS", "TORCH_EXPORT"):
            assert (await following(changes)).progress.phase == phase
    late = world.journal.farm.changes(EVERYTHING)
    assert (await following(late)).snapshot_begins
    assert (await following(late)).job.cells[0].phase == "WAIT_FOR_ROOM"
    await world.step(cell, model.FAILED)
    assert (await following(changes)).cell.state == model.FAILED


async def test_changes_reach_many_watchers_without_a_read_of_the_database(
    world: JournalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchers = [world.journal.farm.changes(EVERYTHING) for _ in range(20)]
    for changes in watchers:
        assert await snapshot(changes) == []
    reads = 0
    read = world.database.read

    async def count(do: Callable[[Connection], Any]) -> Any:
        nonlocal reads
        reads += 1
        return await read(do)

    monkeypatch.setattr(world.database, "read", count)
    job = await world.submit("new", cells=2)
    await world.step(job.cells[0], model.COMPILING)
    for changes in watchers:
        assert [cell.id for cell in (await following(changes)).job.cells] == ["new-0", "new-1"]
        assert (await following(changes)).cell.state == model.COMPILING
    assert reads == 0


async def test_a_new_job_looks_as_it_does_in_a_snapshot(world: JournalWorld) -> None:
    early = world.journal.farm.changes(EVERYTHING)
    await snapshot(early)
    await world.submit("x" * 5_000, 3, name="x" * 5_000, spec=JobSpec(name="x" * 5_000), cell={"candidate_name": "resnet8"})
    sent = (await following(early)).job
    late = world.journal.farm.changes(EVERYTHING)
    assert (await following(late)).snapshot_begins
    assert (await following(late)).job == sent


async def test_only_the_callers_projects_and_the_wanted_owners_jobs_are_sent(world: JournalWorld) -> None:
    await world.submit("a", project="vision")
    await world.submit("b", owner="bob")
    vision = world.journal.farm.changes(Scope(frozenset({"vision"})))
    bobs = world.journal.farm.changes(EVERYTHING, "bob")
    assert (await snapshot(vision), await snapshot(bobs)) == (["a"], ["b"])
    await world.submit("c", owner="bob")
    await world.submit("d", project="vision")
    await world.submit("e", project="vision", owner="bob")
    assert [(await following(vision)).job_id for _ in range(2)] == ["d", "e"]
    assert [(await following(bobs)).job_id for _ in range(2)] == ["c", "e"]


async def test_jobs_of_an_earlier_server_are_watched(world: JournalWorld) -> None:
    job = await world.submit("earlier")
    world = JournalWorld(world.database)
    changes = world.journal.farm.changes(EVERYTHING)
    assert await snapshot(changes) == ["earlier"]
    await world.step(job.cells[0], model.COMPILING)
    assert (await following(changes)).cell.state == model.COMPILING


async def test_a_slow_watcher_gets_the_latest_of_each_cell(world: JournalWorld) -> None:
    job = await world.submit("job")
    changes = world.journal.farm.changes(EVERYTHING)
    await snapshot(changes)
    await world.step(job.cells[0], model.COMPILING, model.WAITING, model.RUNNING, model.WAITING, model.RUNNING)
    assert (await following(changes)).cell.version == 6


async def test_who_misses_too_much_gets_a_new_snapshot(world: JournalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm_watch, "MAX_CHANGES", 3)
    changes = world.journal.farm.changes(EVERYTHING)
    assert await snapshot(changes) == []
    names = [f"job-{number}" for number in range(6)]
    for name in names:
        await world.submit(name)
    assert (await following(changes)).snapshot_begins
    assert await rest_of_snapshot(changes) == names
    remaining = {(await following(changes)).job_id, (await following(changes)).job_id}
    assert remaining == {"job-4", "job-5"}, "what came after the changes were dropped"


async def test_the_memory_of_a_watcher_is_bounded(world: JournalWorld) -> None:
    watcher = farm_watch.JobWatcher(EVERYTHING, "")
    large = JobChange(job_id="job", cell=Cell(id="cell", waiting_for="x" * 100_000))
    for number in range(1000):
        watcher.put(f"cell-{number}", large, large.ByteSize())
        assert watcher.size_bytes <= farm_watch.MAX_BYTES
    assert await watcher.take() is None
