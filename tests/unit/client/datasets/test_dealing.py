"""Samples are dealt in their order, a few at a time, and come out in their order whatever happens to those who run them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from etfarm.client.datasets.dispatch import Deal
from etfarm.client.datasets.samples import Sample


@dataclass(frozen=True)
class Done:
    index: int
    failed: bool = False


def samples(count: int, taken: list[int] | None = None) -> Iterator[Sample]:
    for index in range(count):
        if taken is not None:
            taken.append(index)
        yield Sample(index, str(index))


def begun(source: Iterator[Sample], *, ready: int = 4, window: int = 6, keep_going: bool = False) -> Deal[Done]:
    deal: Deal[Done] = Deal(source, ready=ready, window=window, keep_going=keep_going)
    deal.begin()
    return deal


@settings(max_examples=60, deadline=None)
@drawn(count=st.integers(0, 40), workers=st.integers(1, 4), seed=st.integers(0, 1000), window=st.integers(1, 9))
def test_every_sample_comes_out_once_in_order_though_workers_give_back(count: int, workers: int, seed: int, window: int) -> None:
    chance = random.Random(seed)
    taken: list[int] = []
    ahead = [0]

    async def work(deal: Deal[Done]) -> None:
        while (sample := await deal.take()) is not None:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                await deal.give_back(sample)
            else:
                await deal.settle(Done(sample.index))

    async def everything() -> list[int]:
        deal = begun(samples(count, taken), ready=2, window=window)
        tasks = [asyncio.create_task(work(deal)) for _ in range(workers)]
        out: list[int] = []
        async for result in deal.results():
            ahead[0] = max(ahead[0], len(taken) - len(out))
            out.append(result.index)
        await asyncio.gather(*tasks)
        deal.close()
        return out

    assert asyncio.run(everything()) == list(range(count))
    assert ahead[0] <= window + 1


@settings(max_examples=40, deadline=None)
@drawn(count=st.integers(1, 30), wrong=st.sets(st.integers(0, 29), min_size=1), keep=st.booleans(), seed=st.integers(0, 99))
def test_the_first_failure_is_the_last_result_unless_it_keeps_going(count: int, wrong: set[int], keep: bool, seed: int) -> None:
    chance = random.Random(seed)

    async def work(deal: Deal[Done]) -> None:
        while (sample := await deal.take()) is not None:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            await deal.settle(Done(sample.index, sample.index in wrong))

    async def everything() -> list[Done]:
        deal = begun(samples(count), ready=3, window=8, keep_going=keep)
        tasks = [asyncio.create_task(work(deal)) for _ in range(3)]
        out = [result async for result in deal.results()]
        await asyncio.gather(*tasks)
        deal.close()
        return out

    out = asyncio.run(everything())
    first = min([*wrong, count - 1]) if not keep else count - 1
    assert [result.index for result in out] == list(range(min(first, count - 1) + 1))
    assert [result.index for result in out if result.failed] == sorted(index for index in wrong if index <= out[-1].index)


async def test_no_more_than_the_window_is_read_while_results_are_not_taken() -> None:
    taken: list[int] = []
    deal = begun(samples(1000, taken))
    for _ in range(6):
        sample = await deal.take()
        assert sample is not None
        await deal.settle(Done(sample.index))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await deal.take()
    deal.close()
    assert len(taken) == 6


async def test_a_caller_that_waits_for_a_sample_may_be_asked_to_leave() -> None:
    deal = begun(samples(1))
    leave: list[int] = []
    assert await deal.take() is not None
    waiting = asyncio.create_task(deal.take(lambda: bool(leave)))
    await asyncio.sleep(0)
    leave.append(1)
    await deal.wake()
    assert await waiting is None
    deal.close()


async def test_what_ends_it_is_raised_after_what_is_done() -> None:
    deal = begun(samples(5))
    sample = await deal.take()
    assert sample is not None
    await deal.settle(Done(0))
    await deal.abort(OSError("gone"))
    results = deal.results()
    assert (await anext(results)).index == 0
    with pytest.raises(OSError, match="gone"):
        await anext(results)
    assert await deal.take() is None
    deal.close()


async def test_an_error_of_the_source_is_raised_after_the_results_of_the_samples_before_it() -> None:
    def source() -> Iterator[Sample]:
        yield from samples(3)
        raise OSError("the disk is gone")

    deal = begun(source())
    taken = [await deal.take() for _ in range(3)]
    results = deal.results()
    for sample in reversed(taken):
        assert sample is not None
        await deal.settle(Done(sample.index))
    assert [(await anext(results)).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        await anext(results)
