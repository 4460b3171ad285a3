"""Exclusion of work and measurements on the server's own machine: children do not run while a device on it measures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class MeasurementLock:
    """A lock that any number of workers or exactly one measurement hold.

    A waiting measurement precedes work that has not started, so that a long queue of compilations does not delay the
    measurements that depend on them.
    """

    def __init__(self) -> None:
        self._working = 0
        self._waiting_to_measure = 0
        self._measuring = False
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the lock or waits for it."""
        return not (self._working or self._measuring or self._waiters)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the lock."""
        return bool(self._waiters)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Hold the lock for work. Wait while a measurement runs or waits; measurements wait until the work ends."""
        await self._until(lambda: not self._measuring and not self._waiting_to_measure)
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self._wake()

    @asynccontextmanager
    async def measure(self) -> AsyncIterator[None]:
        """Hold the lock for a measurement. Wait until no work and no other measurement runs; everything else waits."""
        self._waiting_to_measure += 1
        try:
            await self._until(lambda: not self._measuring and not self._working)
            self._measuring = True
        finally:
            self._waiting_to_measure -= 1
            self._wake()
        try:
            yield
        finally:
            self._measuring = False
            self._wake()

    async def _until(self, is_free: Callable[[], bool]) -> None:
        while not is_free():
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
