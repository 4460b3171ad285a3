"""Work of the farm itself, for which no call waits, over times in which the bucket's server is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from etfarm.server.artifacts.s3.errors import BlobsUnavailable
from etfarm.wire.errors import FarmError

log = structlog.get_logger()

T = TypeVar("T")

_PAUSE_S: Final = 1.0
"""Pause between attempts; each of them repeats its requests for some time already."""


async def retry_while_away(work: Callable[[], Awaitable[T]], on_turn: Callable[[bool], None] = lambda has_turn: None) -> T:
    """Await `work`, and repeat it while the bucket's server is unavailable. To stop, cancel the task.

    Args:
        on_turn: called with False before each pause, and with True after it.
    """
    while True:
        try:
            return await work()
        except FarmError as error:
            if error.reason != BlobsUnavailable.reason:  # the error may have passed through another process
                raise
            log.warning("the artifacts' S3 server is unavailable; trying again", error=error.message, seconds=_PAUSE_S)
        on_turn(False)
        await asyncio.sleep(_PAUSE_S)
        on_turn(True)
