"""Turns of visitors: requests in a steady pace, and slots for what takes long. Owners, an address or a token, are equal."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from etfarm.client.errors import Kind, UserError

MAX_DELAY_S: Final = 1.0
"""Longest delay of a request by the pace of its owner; what would wait longer is refused."""
MAX_OWNERS: Final = 4_096
FREE_REFUSALS: Final = 10
"""Number of an owner's refused sign-ins that are answered at once."""
REFUSAL_S: Final = 1.0
"""Seconds that the answer to each further one takes, in which it keeps one of the owner's turns."""
FORGET_S: Final = 300.0
"""Seconds without a refusal after which they are counted anew."""


class TooManyRequests(UserError):
    """Error of a request beside too many others."""

    reason = "TOO_MANY_REQUESTS"
    kind = Kind.RESOURCE_EXHAUSTED


class Pace:
    """Times of the requests of each owner: at once up to a number, then evenly spaced.

    Nobody is refused who sends the next request after the answer to the last one, as connections do.
    """

    def __init__(
        self, per_s: float, at_once: int, max_delay_s: float = MAX_DELAY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start without requests.

        Args:
            per_s: requests a second of an owner.
            at_once: number of requests without a delay, after a pause.
            max_delay_s: longest delay.
        """
        self._max_delay_s = max_delay_s
        self._step_s = 1.0 / per_s
        self._burst_s = at_once / per_s
        self._clock = clock
        self._next_s: OrderedDict[str, float] = OrderedDict()
        """When the next request would be on time if none had ever been early, by owner."""

    def delay_s(self, owner: str) -> float:
        """Count a request, and return the seconds that it has to wait.

        Raises:
            TooManyRequests: too many requests of the owner wait already.
        """
        now = self._clock()
        next_s = max(self._next_s.pop(owner, now), now)
        delay_s = next_s - now - self._burst_s
        is_late = delay_s > self._max_delay_s
        self._next_s[owner] = next_s if is_late else next_s + self._step_s
        if len(self._next_s) > MAX_OWNERS:
            self._next_s.popitem(last=False)
        if is_late:
            raise TooManyRequests("Too many requests came from here at the same time.", "Wait a second, then reload the page.")
        return max(0.0, delay_s)


class FairSlots:
    """Slots of which each owner has some at most; a free one goes to the waiting owner that holds the fewest.

    The empty owner stands for many visitors, behind a proxy that names none, and has neither limit.
    """

    def __init__(self, slots: int, of_owner: int, waiting_of_owner: int, what: str) -> None:
        """Start with free slots.

        Args:
            of_owner: maximum number of slots that an owner holds.
            waiting_of_owner: maximum number of callers of an owner that wait.
            what: names what the slots are for, in the plural, such as "downloads".
        """
        self._free = slots
        self._of_owner = of_owner
        self._waiting_of_owner = waiting_of_owner
        self._what = what
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def take(self, owner: str, wait_s: float) -> AsyncIterator[None]:
        """Hold a slot until the block ends.

        Raises:
            TooManyRequests: no slot became free in time, or too many of the owner wait.
        """
        await self.acquire(owner, wait_s)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str, wait_s: float) -> None:
        """Take a slot, which `release` gives back.

        Raises:
            TooManyRequests: no slot became free in time, or too many of the owner wait.
        """
        if owner and sum(each == owner for each, _ in self._waiting) >= self._waiting_of_owner:
            raise self._refusal()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, turn))
        self._hand_out()
        try:
            await asyncio.wait_for(asyncio.shield(turn), wait_s)
        except BaseException as error:
            if turn.done():
                self.release(owner)  # the slot was granted at the same moment
            else:
                self._waiting.remove((owner, turn))
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def release(self, owner: str) -> None:
        """Give a slot back."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free:
            entitled = [each for each in self._waiting if not each[0] or self._held[each[0]] < self._of_owner]
            if not entitled:
                return
            # The first one of those that hold the fewest: the list is in the order of arrival.
            owner, turn = following = min(entitled, key=lambda each: self._held[each[0]])
            self._waiting.remove(following)
            self._free -= 1
            self._held[owner] += 1
            turn.set_result(None)

    def _refusal(self) -> TooManyRequests:
        return TooManyRequests(
            f"Too many {self._what} are in progress.", "Wait for one of them, then try again.", limit=self._of_owner
        )


class Refusals:
    """Refused sign-ins by owner: after some, each further one takes its time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without refusals."""
        self._clock = clock
        self._last: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def delay_s(self, owner: str) -> float:
        """Count a refusal, and return the seconds that its answer has to wait."""
        now = self._clock()
        count, last_s = self._last.pop(owner, (0, now))
        count = 1 if now - last_s > FORGET_S else count + 1
        self._last[owner] = count, now
        if len(self._last) > MAX_OWNERS:
            self._last.popitem(last=False)
        return REFUSAL_S if count > FREE_REFUSALS else 0.0
