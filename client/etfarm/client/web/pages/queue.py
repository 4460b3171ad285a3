"""The queue: what waits for a device, for what, since when, and when it may start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.models import Queue, QueuedRun
from etfarm.client.web.live import Topic
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of

PAUSE_S: Final = 0.5
"""Pause between two readings of the queue, which changes with every job and device."""


async def queue(request: Request) -> Response:
    """Show what waits for a device, first ones first."""
    feed = await visitor_of(request).account.feeds.open(QUEUE)
    position = feed.position
    waiting = await (await farm(request)).queue()
    return render(
        request, "queue.html", title="Queue", command="etfarm queue", items=_by_key(waiting), other_runs=waiting.other_runs,
        position=position,
    )  # fmt: skip


def _by_key(waiting: Queue) -> dict[str, QueuedRun]:
    return {run.session_id or "+".join(run.cell_ids): run for run in waiting.runs}


async def _load(client: AsyncFarm, argument: str) -> Mapping[str, QueuedRun]:
    return _by_key(await client.queue())


async def _watch(client: AsyncFarm, argument: str) -> AsyncIterator[tuple[str, QueuedRun | None]]:
    """Yield what has changed in the queue after each change of a job or a device, which are all that can change it."""
    shown = _by_key(await client.queue())
    async for _ in _changes(lambda: client.watch_jobs(), lambda: client.watch_devices(telemetry=False)):
        current = _by_key(await client.queue())
        for key in shown.keys() - current.keys():
            yield key, None
        for key, run in current.items():
            if shown.get(key) != run:
                yield key, run
        shown = current


async def _changes(*watches: Callable[[], AsyncIterator[Any]]) -> AsyncIterator[None]:
    """Yield at once after a change in the watches, and again after `PAUSE_S`, however many changes there are in between.

    Raises:
        EtfarmError: as a watch.
    """
    changed = asyncio.Event()

    async def read(watch: Callable[[], AsyncIterator[Any]]) -> None:
        async for _ in watch():
            changed.set()

    readers = [asyncio.create_task(read(watch), name="changes of the queue") for watch in watches]
    for reader in readers:
        reader.add_done_callback(lambda _: changed.set())
    try:
        while True:
            await changed.wait()
            for reader in readers:
                if reader.done():
                    reader.result()
                    return
            changed.clear()
            yield
            await asyncio.sleep(PAUSE_S)
            if not changed.is_set():
                yield  # the farm announces a change before its queue has it
    finally:
        await _end(readers)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    waiting: Awaitable[Any] = asyncio.gather(*tasks, return_exceptions=True)
    await waiting


QUEUE: Final = Topic("queue", "_queue_row.html", _load, _watch)

TOPICS = (QUEUE,)
ROUTES = (Route("/queue", queue, name="queue", methods=["GET"]),)
