"""Waiting for what no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def becomes(condition: Callable[[], object], within_s: float = 60.0, pause_s: float = 0.005) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(pause_s)
