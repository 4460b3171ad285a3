"""Fair sharing of the pool's slots: projects take turns, so that a long queue of one project does not delay the others."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Slots that go to the project that holds the fewest; on a tie, to the project that has waited longest since its last slot.

    Args:
        slots: maximum number of slots that are held at a time.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting callers by project, the project that received a slot longest ago first; no queue is empty."""

    @asynccontextmanager
    async def take(self, project: str) -> AsyncIterator[None]:
        """Hold a slot; earlier callers of the same project go first."""
        if self._free:
            self._free -= 1
            self._held[project] += 1
        else:
            await self._wait(project)
        try:
            yield
        finally:
            self._release(project)

    async def _wait(self, project: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(project)  # the slot was granted at the same moment
            else:
                self._leave(project, turn)
            raise

    def _leave(self, project: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[project]
        queue.remove(turn)
        if not queue:
            del self._waiting[project]

    def _release(self, project: str) -> None:
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
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
