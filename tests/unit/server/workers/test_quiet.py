"""Work and measurements keep out of each other's way on one machine."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etfarm.server.workers.measurement_lock import MeasurementLock


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_measurement_waits_for_work_and_goes_before_work_that_has_not_begun() -> None:
    lock, text = MeasurementLock(), []
    release = asyncio.Event()

    async def working(name: str) -> None:
        async with lock.work():
            text.append(name)
            await release.wait()

    async def measuring() -> None:
        async with lock.measure():
            text.append("measure")

    async with asyncio.TaskGroup() as group:
        group.create_task(working("first"))
        group.create_task(working("second"))
        await _settle()
        group.create_task(measuring())
        await _settle()
        group.create_task(working("late"))
        await _settle()
        assert text == ["first", "second"]
        release.set()
    assert text == ["first", "second", "measure", "late"]


async def test_a_cancelled_measurement_delays_no_other() -> None:
    lock = MeasurementLock()
    async with lock.work():
        waiting = asyncio.create_task(lock.measure().__aenter__())
        await _settle()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(60), lock.work():
            pass


@given(st.lists(st.tuples(st.sampled_from(["work", "measure"]), st.integers(0, 4)), max_size=30))
def test_nothing_runs_beside_a_measurement_and_everybody_gets_a_turn(tasks: list[tuple[str, int]]) -> None:
    async def all_of_them() -> None:
        lock, inside, done = MeasurementLock(), [], []

        async def one(kind: str, pauses: int) -> None:
            async with lock.work() if kind == "work" else lock.measure():
                inside.append(kind)
                assert "measure" not in inside or inside == ["measure"]
                for _ in range(pauses):
                    await asyncio.sleep(0)
                assert "measure" not in inside or inside == ["measure"]
                inside.remove(kind)
                done.append(kind)

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for kind, pauses in tasks:
                group.create_task(one(kind, pauses))
        assert sorted(done) == sorted(kind for kind, _ in tasks)

    asyncio.run(all_of_them())
