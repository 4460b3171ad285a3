"""The log of a job: every line once, in order, to those who follow too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import UTC

import pytest

from etfarm.server.access.scope import EVERYTHING
from etfarm.server.jobs import model
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.state.engine import Database
from etfarm.v1.common_pb2 import LogSource
from etfarm.v1.job_pb2 import LogLine
from tests.support.jobs import AT, JournalWorld

WAIT_S = 60.0


class World(JournalWorld):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.log = self.new_log()

    def new_log(self) -> JobLog:
        return JobLog(self.database, self.announcer, lambda: AT)

    def add(self, text: str) -> None:
        self.log.add("j", "c", LogSource.LOG_SOURCE_COMPILE, text)

    async def tail(self, *, follow: bool = False, cell: str = "") -> list[LogLine]:
        async with asyncio.timeout(WAIT_S):
            return [line async for line in self.log.tail("j", cell, follow=follow)]

    async def end_job(self) -> None:
        (cell,) = (await self.journal.get("j", EVERYTHING)).cells
        await self.step(cell, model.CANCELLED)


@pytest.fixture
async def world(database: Database) -> AsyncIterator[World]:
    created = World(database)
    await created.submit("j")
    yield created
    await created.log.flush()


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


async def test_lines_come_back_numbered_with_their_source(world: World) -> None:
    for number in range(1200):
        world.log.add("j", "c" if number % 2 else "d", LogSource.LOG_SOURCE_COMPILE, f"line {number}")
    lines = await world.tail()
    assert texts(lines) == [f"line {number}" for number in range(1200)]
    assert [line.number for line in lines] == list(range(1, 1201))
    assert {line.source for line in lines} == {LogSource.LOG_SOURCE_COMPILE}
    assert lines[0].time.ToDatetime(UTC) == AT
    assert texts(await world.tail(cell="c")) == [f"line {number}" for number in range(1, 1200, 2)]


async def test_a_line_whose_writing_has_begun_is_not_missed(world: World) -> None:
    gate = threading.Event()
    blocked = asyncio.create_task(world.database.write(lambda _: gate.wait(WAIT_S)))
    world.add("early")
    flushing = world.log._flushing
    assert flushing is not None
    await asyncio.sleep(0)  # the flush's first step: it holds the line now, and waits for the database
    tailing = asyncio.create_task(world.tail())
    for _ in range(10):
        await world.database.read(lambda _: None)  # time enough for a tail that would not wait
    gate.set()
    assert texts(await tailing) == ["early"]
    await blocked


async def test_a_cancelled_tail_loses_no_line(world: World) -> None:
    gate = threading.Event()
    blocked = asyncio.create_task(world.database.write(lambda _: gate.wait(WAIT_S)))
    await asyncio.sleep(0)
    world.add("kept")
    tailing = asyncio.create_task(world.tail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tailing.cancel()
    await asyncio.wait([tailing])
    gate.set()
    await blocked
    assert texts(await world.tail()) == ["kept"]


async def test_following_gives_what_was_and_what_comes_until_the_job_ends(world: World) -> None:
    world.add("before")
    got: list[str] = []
    arrived = asyncio.Event()

    async def follow() -> None:
        async for line in world.log.tail("j", "", follow=True):
            got.append(line.text)
            arrived.set()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(follow())
        await arrived.wait()
        for number in range(3):
            arrived.clear()
            world.add(f"later {number}")
            await arrived.wait()
        await world.end_job()
    assert got == ["before", "later 0", "later 1", "later 2"]


async def test_following_a_job_that_is_over_ends(world: World) -> None:
    world.add("all")
    await world.end_job()
    assert texts(await world.tail(follow=True)) == ["all"]


async def test_a_new_server_goes_on_counting(world: World) -> None:
    world.add("one")
    await world.log.flush()
    world.log = world.new_log()
    await world.log.resume("j")
    world.add("two")
    assert [(line.number, line.text) for line in await world.tail()] == [(1, "one"), (2, "two")]


async def test_a_line_without_end_is_cut(world: World) -> None:
    world.add("x" * 100_000)
    (line,) = await world.tail()
    assert line.text == "x" * 8000


async def test_of_jobs_that_have_ended_only_the_last_ones_take_memory(world: World) -> None:
    numbers: list[int] = []
    world.announcer.on_event(lambda _, event: numbers.append(event.log.number) if event.HasField("log") else None)
    world.add("first")
    await world.end_job()
    for number in range(999):
        world.log.end(f"other-{number}")
    world.add("late")
    assert numbers == [1, 2]
    world.log.end("another")
    await world.log.flush()
    world.add("an hour later, which does not happen")
    assert numbers == [1, 2, 1]
