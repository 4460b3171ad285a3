"""Whose child runs next: projects take turns, so that none waits for all that another has queued."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Slots that are given to who has the fewest of them; among equals, to who was given one longest ago.

    Args:
        slots: held at a time.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By who waits, the one that was given a slot longest ago first; no queue is empty."""

    @asynccontextmanager
    async def take(self, whose: str) -> AsyncIterator[None]:
        """Hold a slot, after those of the same `whose` that came before."""
        if self._free:
            self._free -= 1
            self._held[whose] += 1
        else:
            await self._wait(whose)
        try:
            yield
        finally:
            self._give_back(whose)

    async def _wait(self, whose: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(whose, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(whose)  # it was given in the same moment
            else:
                self._leave(whose, turn)
            raise

    def _leave(self, whose: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[whose]
        queue.remove(turn)
        if not queue:
            del self._waiting[whose]

    def _give_back(self, whose: str) -> None:
        self._held[whose] -= 1
        if not self._held[whose]:
            del self._held[whose]
        self._free += 1
        while self._free and self._waiting:
            following = min(self._waiting, key=lambda each: self._held[each])
            queue = self._waiting[following]
            turn = queue.popleft()
            self._waiting.move_to_end(following)
            if not queue:
                del self._waiting[following]
            if turn.cancelled():
                continue
            turn.set_result(None)
            self._free -= 1
            self._held[following] += 1
