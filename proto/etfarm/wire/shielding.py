"""Work that goes on when its caller is cancelled, and the end of work that must not."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(work: asyncio.Task[T] | asyncio.Future[T]) -> T:
    """Return the result of work that a cancelled caller does not cancel.

    If it fails then, its error is dropped, as no caller is left to raise it to. asyncio would log a traceback.
    """
    work.add_done_callback(retrieve_error)
    return await asyncio.shield(work)


def retrieve_error(work: asyncio.Future[Any]) -> None:
    """Mark the error of a future as seen: a callback for work that may lose all who wait for it."""
    if not work.cancelled():
        work.exception()


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel work, and wait until it has ended; its errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
