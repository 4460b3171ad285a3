"""Fair sharing of the pool's slots: projects take turns, so that a long queue of one project does not delay the others."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

_Queues: TypeAlias = "OrderedDict[str, deque[asyncio.Future[None]]]"
"""Waiting callers by project, the project that received a slot longest ago first; no queue is empty."""


class FairSlots:
    """Slots that go to the project that holds the fewest; on a tie, to the project that has waited longest since its last slot.

    Args:
        slots: maximum number of slots that are held at a time.
        reserved: number of these slots that only urgent callers may take.
    """

    def __init__(self, slots: int, reserved: int = 0) -> None:
        self._free = slots
        self._reserved = reserved
        self._held: Counter[str] = Counter()
        self._urgent: _Queues = OrderedDict()
        self._waiting: _Queues = OrderedDict()

    @asynccontextmanager
    async def take(self, project: str, *, urgent: bool = False) -> AsyncIterator[None]:
        """Hold a slot; earlier callers of the same project go first, and all urgent callers before all others."""
        if self._free > (0 if urgent else self._reserved):
            self._free -= 1
            self._held[project] += 1
        else:
            await self._wait(project, self._urgent if urgent else self._waiting)
        try:
            yield
        finally:
            self._release(project)

    async def _wait(self, project: str, queues: _Queues) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queues.setdefault(project, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(project)  # the slot was granted at the same moment
            else:
                queue = queues.get(project)
                if queue is not None and turn in queue:  # else a slot became free meanwhile, and the turn was passed over
                    queue.remove(turn)
                    if not queue:
                        del queues[project]
            raise

    def _release(self, project: str) -> None:
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        self._free += 1
        while (queues := self._next_queues()) is not None:
            following = min(queues, key=lambda each: self._held[each])
            queue = queues[following]
            turn = queue.popleft()
            queues.move_to_end(following)
            if not queue:
                del queues[following]
            if turn.cancelled():
                continue
            turn.set_result(None)
            self._free -= 1
            self._held[following] += 1

    def _next_queues(self) -> _Queues | None:
        """Return the queues that the next free slot goes to; None if nobody who waits may take one."""
        if self._free and self._urgent:
            return self._urgent
        return self._waiting if self._free > self._reserved and self._waiting else None
