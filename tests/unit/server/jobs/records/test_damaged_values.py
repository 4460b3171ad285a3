"""Damage to what the database stores of jobs: it is named with its job, and the other jobs go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Column, Table, func, select, update

from etfarm.client.jobs.job import AsyncJob
from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.conductor import Conductor
from etfarm.server.jobs.records.deletion import JobDeletion
from etfarm.server.jobs.records.verification import find_damaged
from etfarm.server.jobs.takeups import Hands, Takeups
from etfarm.server.state import schema
from etfarm.server.state.bodies import ValueDamaged, is_whole, seal, unseal
from etfarm.server.state.engine import Database
from etfarm.v1.job_pb2 import Candidate, Cell, Job, JobSpec, JobState
from etfarm.v1.report_pb2 import GetReportsRequest, GetReportsResponse, Report
from tests.support.jobs import AT, JournalWorld
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")


class World(JournalWorld):
    """A journal with the jobs `a` and `b`, of which `a` will be damaged."""

    async def submit_named(self, name: str) -> Job:
        spec = JobSpec(labels={"k": "v"}, candidates=[Candidate(name="resnet8")])
        return await self.submit(name, 2, spec=spec, cell={"candidate_name": "resnet8"})

    async def submit_ended(self, names: str) -> None:
        """Write jobs with failed cells and their reports."""
        for name in names:
            for cell in (await self.submit_named(name)).cells:
                report = Report(id=f"r{cell.id}", cell=cell.id)
                report.create_time.FromDatetime(AT)
                await self.journal.change(model.advance(cell, model.FAILED, at=AT), report=report)

    async def body(self, report: str) -> bytes:
        """Return what is stored of a report."""
        query = select(schema.reports.c.body).where(schema.reports.c.id == report)
        return await self.database.read(lambda connection: connection.execute(query).scalar_one())

    async def overwrite(self, report: str, body: bytes) -> None:
        change = update(schema.reports).where(schema.reports.c.id == report).values(body=body)
        await self.database.write(lambda connection: connection.execute(change))

    async def damage(self, table: Table, column: Column[Any], key: Column[Any], value: str) -> None:
        """Flip a bit in the middle of a stored value."""
        body = bytearray(await self.database.read(lambda c: c.execute(select(column).where(key == value).limit(1)).scalar_one()))
        body[len(body) // 3] ^= 1
        change = update(table).where(key == value).values({column: bytes(body)})
        await self.database.write(lambda connection: connection.execute(change))

    async def damaged(self) -> list[str]:
        return [name for part in [part async for part in find_damaged(self.database)] for name in part]


@pytest.fixture
def world(database: Database) -> World:
    return World(database)


async def test_a_damaged_cell_is_its_error_in_its_job_and_in_lists(world: World) -> None:
    await world.submit_ended("ab")
    assert await world.damaged() == []
    await world.damage(schema.cells, schema.cells.c.body, schema.cells.c.id, "a-0")
    for job in (await world.journal.get("a", EVERYTHING), (await world.journal.list(10, None, EVERYTHING))[0][1]):
        assert (job.id, job.state) == ("a", JobState.JOB_STATE_FAILED)
        assert (job.cells[0].id, job.cells[0].state, job.cells[0].error.reason) == ("a-0", model.FAILED, "VALUE_DAMAGED")
        assert "etfarm jobs delete a" in job.cells[0].error.remedy and job.cells[1].candidate_name == "resnet8"
    assert (await world.journal.get("b", EVERYTHING)).cells[0].error.reason == ""
    assert await world.damaged() == ["a cell of job a"]


@pytest.mark.remedy("VALUE_DAMAGED")
async def test_a_damaged_specification_or_report_is_refused_and_its_job_can_be_deleted(world: World) -> None:
    await world.submit_ended("ab")
    await world.damage(schema.jobs, schema.jobs.c.spec, schema.jobs.c.id, "a")
    await world.damage(schema.reports, schema.reports.c.body, schema.reports.c.id, "ra-1")
    with pytest.raises(ValueDamaged, match="The specification of job a is damaged"):
        await world.journal.get("a", EVERYTHING)
    with pytest.raises(ValueDamaged, match="A report of job a is damaged"):
        await world.journal.reports.of_job("a")
    assert len(await world.journal.reports.of_job("b")) == 2
    assert [job.id for job in (await world.journal.list(10, None, EVERYTHING))[0]] == ["b", "a"]
    assert await world.damaged() == ["the specification of job a", "a report of job a"]
    # The remedy.
    assert (await world.journal.outline("a", EVERYTHING)).owner == "ann"
    await JobDeletion(world.database).delete("a")
    assert await world.damaged() == []


@pytest.mark.remedy("REPORT_INCOMPLETE")
async def test_a_job_whose_report_lacks_its_state_is_refused_by_the_client_and_can_be_deleted(world: World) -> None:
    await world.submit_ended("a")
    cut = Report(id="ra-1", cell="a-1")
    cut.create_time.FromDatetime(AT)
    await world.overwrite("ra-1", cut.SerializeToString())  # as an earlier release stored it

    async def get(request: GetReportsRequest) -> GetReportsResponse:
        return GetReportsResponse(reports=await world.journal.reports.of_job(request.job_id))

    stubs: Any = SimpleNamespace(reports=SimpleNamespace(Get=get), server="farm:1", lasting=lambda _: stubs)
    with refuses("REPORT_INCOMPLETE", match="etfarm jobs delete a"):
        await AsyncJob(stubs, await world.journal.get("a", EVERYTHING)).document(with_series=False)
    await JobDeletion(world.database).delete("a")
    with refuses("JOB_NOT_FOUND"):
        await world.journal.get("a", EVERYTHING)


async def test_a_damaged_event_ends_the_watch_of_its_job_alone(world: World) -> None:
    await world.submit_ended("ab")
    await world.damage(schema.events, schema.events.c.body, schema.events.c.job_id, "a")
    with pytest.raises(ValueDamaged, match="An event of job a"):
        assert [event async for event in world.journal.watch("a", 0)]
    assert [event async for event in world.journal.watch("b", 0)]


@pytest.mark.parametrize("what", ["cell", "spec"])
async def test_a_live_job_that_is_damaged_fails_at_the_next_start_and_the_others_go_on(
    world: World, what: str, tmp_path: Path
) -> None:
    await world.submit_named("a")
    await world.submit_named("b")
    if what == "cell":
        await world.damage(schema.cells, schema.cells.c.body, schema.cells.c.id, "a-0")
    else:
        await world.damage(schema.jobs, schema.jobs.c.spec, schema.jobs.c.id, "a")
    conductor = Conductor(world.journal, world.announcer, Stages(Hands(Takeups(world.database), tmp_path)))  # type: ignore[arg-type]
    started: list[str] = []
    conductor.start = lambda job: started.append(job.id)  # type: ignore[method-assign,assignment]
    await conductor.resume()
    assert started == ["b"]
    job = await world.journal.outline("a", EVERYTHING)
    assert job.state == JobState.JOB_STATE_FAILED and {cell.error.reason for cell in job.cells} == {"VALUE_DAMAGED"}
    assert [job.id for job in await world.journal.live()] == ["b"]


class Stages:
    """Stages of a server to which no agent has connected."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands

    async def resume(self, job: Job) -> None: ...


def test_a_value_is_read_as_it_was_written_also_by_releases_without_checksums() -> None:
    cell = Cell(id="a", candidate_name="é" * 100)
    for body in (seal(cell), cell.SerializeToString()):
        assert is_whole(body) and unseal(Cell, body, "a cell", "a") == cell
    assert Cell.FromString(seal(cell)).candidate_name == cell.candidate_name
    sealed = seal(cell)
    undetected = []
    for index in range(len(sealed)):
        changed = bytearray(sealed)
        changed[index] ^= 0x10
        try:
            if unseal(Cell, bytes(changed), "a cell", "a").candidate_name != cell.candidate_name:
                undetected.append(index)
        except ValueDamaged as damaged:
            assert "of job a is damaged" in damaged.message
    assert undetected == []
    assert unseal(Cell, seal(Cell()), "a cell", "a") == Cell()


FIRST_FIELDS = Report(id="ra-0", cell="a-0").SerializeToString()


@pytest.mark.parametrize(
    "cut",
    [lambda body: body[:-20], lambda body: body[:-20] + bytes(20), lambda body: b"", lambda body: FIRST_FIELDS],
    ids=["without its tail", "with a zeroed tail", "nothing", "its first fields"],
)
async def test_a_report_of_which_a_part_is_left_is_damaged(world: World, cut: Callable[[bytes], bytes]) -> None:
    await world.submit_ended("a")
    await world.overwrite("ra-0", cut(await world.body("ra-0")))
    with pytest.raises(ValueDamaged, match="A report of job a is damaged"):
        await world.journal.reports.of_job("a")
    assert await world.damaged() == ["a report of job a"]


async def test_values_are_read_by_their_size(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.submit_ended("abc")
    report = schema.reports.c
    for cell in ("a-0", "b-1", "c-1"):
        await world.damage(schema.reports, report.body, report.id, f"r{cell}")
    size_bytes = await world.database.read(lambda c: c.execute(select(func.max(func.length(report.body)))).scalar_one())
    for page_bytes, parts in ((2 * size_bytes, [1, 1, 1]), (size_bytes // 2, [1, 1, 1]), (1 << 20, [3])):
        monkeypatch.setattr("etfarm.server.jobs.records.verification.PAGE_BYTES", page_bytes)
        named = [part async for part in find_damaged(world.database) if part]
        assert [len(part) for part in named] == parts
        assert [name for part in named for name in part] == [f"a report of job {name}" for name in "abc"]
