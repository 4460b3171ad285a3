"""Quiet on the server's own machine: children do not work while a device on it measures, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Quiet:
    """Many may work at a time, or one may measure. Who wants to measure goes before work that has not begun, so that a long
    row of compilations cannot hold up the measurements that it feeds."""

    def __init__(self) -> None:
        self._working = 0
        self._wanting = 0
        self._measuring = False
        self._waiters: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Waits until nobody measures, or wants to; measurements wait while it is held."""
        await self._until(lambda: not self._measuring and not self._wanting)
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._wake()

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """Waits until nobody works or measures; everything else waits while it is held."""
        self._wanting += 1
        try:
            await self._until(lambda: not self._measuring and not self._working)
            self._measuring = True
        finally:
            self._wanting -= 1
            self._wake()
        try:
            yield
        finally:
            self._measuring = False
            self._wake()

    async def _until(self, free: Callable[[], bool]) -> None:
        while not free():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
