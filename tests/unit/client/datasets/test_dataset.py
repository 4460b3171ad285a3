"""The end of a data set: no caller waits forever, whatever fails or is cancelled while it closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from etfarm.client.datasets.dataset import Dataset, TextCallback
from etfarm.client.sessions.session import AsyncSession

WAIT_S = 60.0


def dataset(choose: Callable[[], Awaitable[Sequence[tuple[str, str]]]], close: Callable[[], Awaitable[None]]) -> Dataset:
    """Return a data set that opens no session."""

    def open_session(selector: str, on_wait: TextCallback) -> AsyncSession:
        raise AssertionError("no device was chosen")

    return Dataset([], choose, open_session, close)


async def test_a_data_set_whose_close_fails_has_ended() -> None:
    async def choose() -> Sequence[tuple[str, str]]:
        raise LookupError("no device")

    async def close() -> None:
        raise OSError("no space left")

    ending = dataset(choose, close)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(OSError, match="no space left"):
            assert [result async for result in ending.results()] == []
        assert not ending.is_running
        await ending.wait_until_ended()


async def test_a_data_set_that_is_cancelled_again_while_it_closes_has_ended() -> None:
    chosen, closing = asyncio.Event(), asyncio.Event()

    async def choose() -> Sequence[tuple[str, str]]:
        chosen.set()
        await asyncio.Event().wait()
        raise AssertionError("the wait has no end")

    async def close() -> None:
        closing.set()
        await asyncio.Event().wait()

    ending = dataset(choose, close)

    async def iterate() -> None:
        async for _ in ending.results():
            raise AssertionError("there are no samples")

    task = asyncio.create_task(iterate())
    async with asyncio.timeout(WAIT_S):
        await chosen.wait()
        assert ending.is_running
        waiting = asyncio.create_task(ending.wait_until_ended())
        task.cancel()
        await closing.wait()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled() and not ending.is_running
        await waiting
