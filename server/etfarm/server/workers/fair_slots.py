"""Fair sharing of the pool's slots: projects take turns, so that a long queue of one project does not delay the others."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

_MOST_AHEAD: Final = 8
"""Maximum number of urgent callers in a row that receive slots before others who wait and whom only urgent ones keep waiting."""

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
        self._shared = slots - reserved
        self._reserved = reserved
        self._urgent_held = 0
        self._ahead = 0
        self._held: Counter[str] = Counter()
        self._urgent: _Queues = OrderedDict()
        self._waiting: _Queues = OrderedDict()

    @property
    def shared(self) -> int:
        """Number of slots for all callers."""
        return self._shared

    @property
    def held(self) -> int:
        """Number of slots that are held."""
        return self._shared + self._reserved - self._free

    @asynccontextmanager
    async def take(self, project: str, *, urgent: bool = False) -> AsyncIterator[None]:
        """Hold a slot; earlier callers of the same project go first, and urgent callers before others, but not for ever."""
        if self._is_free(urgent):
            self._grant(project, urgent)
        else:
            await self._wait(project, urgent)
        try:
            yield
        finally:
            self._release(project, urgent)

    def resize(self, slots: int) -> None:
        """Change the number of slots; those that are held above it end with their holders."""
        self._free += slots - (self._shared + self._reserved)
        self._shared = slots - self._reserved
        self._hand_out()

    async def _wait(self, project: str, urgent: bool) -> None:
        queues = self._urgent if urgent else self._waiting
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queues.setdefault(project, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(project, urgent)  # the slot was granted at the same moment
            else:
                queue = queues.get(project)
                if queue is not None and turn in queue:  # else a slot became free meanwhile, and the turn was passed over
                    queue.remove(turn)
                    if not queue:
                        del queues[project]
                self._hand_out()  # urgent callers may have waited for this one
            raise

    def _is_free(self, urgent: bool) -> bool:
        """Return whether a caller may take a slot now."""
        if urgent:
            return self._free > 0 and not (self._waiting and self._ahead >= _MOST_AHEAD)
        return self._free > self._reserved

    def _grant(self, project: str, urgent: bool) -> None:
        self._free -= 1
        self._held[project] += 1
        if not urgent:
            self._ahead = 0
            return
        self._urgent_held += 1
        others_held = self._shared + self._reserved - self._free - self._urgent_held
        if self._waiting and others_held < self._shared:
            self._ahead += 1

    def _release(self, project: str, urgent: bool) -> None:
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        self._urgent_held -= urgent
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the free slots to those who wait."""
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
            self._grant(following, queues is self._urgent)

    def _next_queues(self) -> _Queues | None:
        """Return the queues that the next free slot goes to; None if no waiting caller may take one."""
        if self._urgent and self._is_free(True):
            return self._urgent
        return self._waiting if self._waiting and self._is_free(False) else None
