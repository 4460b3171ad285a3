"""Fair sharing of slots between projects, by the seconds that they hold them.

Neither a long queue of one project nor its long tasks take slots from the others for longer than its share.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

_MOST_AHEAD: Final = 8
"""Maximum number of urgent callers in a row that receive slots before others who wait and whom only urgent ones keep waiting."""

_MOST_DEBT_S: Final = 900.0
"""Maximum slot time that a project makes up for; it may have held many slots before others came."""

_Queues: TypeAlias = "OrderedDict[str, deque[asyncio.Future[None]]]"
"""Waiting callers by project, the project that received a slot longest ago first; no queue is empty."""


class SlotTime:
    """The slot time of projects, by start-time fair queuing: a project that comes starts level with the one that used least.

    What a project used while no other was there does not count against it, and no project saves up for later.
    """

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._least_s = 0.0
        self._counted_s = 0.0

    def of(self, project: str) -> float:
        """Return a project's slot time in seconds, of which only differences have a meaning."""
        return self._used_s.get(project, self._least_s)

    def count(self, now_s: float, held: Mapping[str, int], waiting: Collection[str]) -> None:
        """Count the time until now.

        Args:
            held: number of slots by project that were held since the last call.
            waiting: projects that wait for a slot.
        """
        elapsed_s, self._counted_s = now_s - self._counted_s, now_s
        present = {project: self.of(project) + elapsed_s * held.get(project, 0) for project in (*held, *waiting)}
        if not present:
            self._used_s.clear()
            return
        self._least_s = max(self._least_s, min(present.values()))
        used = self._used_s | present
        most_s = self._least_s + _MOST_DEBT_S
        self._used_s = {
            project: min(used_s, most_s) for project, used_s in used.items() if used_s > self._least_s or project in present
        }


class FairSlots:
    """Slots that go to the project that holds the fewest, then to the one that used the least slot time lately.

    On a tie, they go to the project that has waited longest since its last slot. Thus a project gets its first slot before
    any other gets a second one, and projects that compete hold slots equally long, however long their tasks take.

    Args:
        slots: maximum number of slots that are held at a time.
        reserved: number of these slots that only urgent callers may take.
        clock: returns seconds on a monotonic clock.
        keeps_room: whether no project may hold more slots than it leaves free, so that one that comes later need not wait for
            long tasks of others.
    """

    def __init__(
        self, slots: int, reserved: int = 0, clock: Callable[[], float] = time.monotonic, *, keeps_room: bool = False
    ) -> None:
        self._free = slots
        self._keeps_room = keeps_room
        self._shared = slots - reserved
        self._reserved = reserved
        self._urgent_held = 0
        self._ahead = 0
        self._held: Counter[str] = Counter()
        self._time = SlotTime()
        self._clock = clock
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
        self._count()
        if self._is_free(urgent) and self._has_room(project):
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

    def _count(self) -> None:
        self._time.count(self._clock(), self._held, {*self._waiting, *self._urgent})

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

    def _has_room(self, project: str) -> bool:
        """Return whether a project may hold one more of the free slots."""
        return not self._keeps_room or self._held[project] < self._free

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
        self._count()
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        self._urgent_held -= urgent
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the free slots to those who wait."""
        self._count()
        while (queues := self._next_queues()) is not None:
            following = min(queues, key=lambda each: (self._held[each], self._time.of(each)))
            if not self._has_room(following):
                return  # the others hold no fewer
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
