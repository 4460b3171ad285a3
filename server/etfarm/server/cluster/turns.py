"""Turns of callers to have a message in this process, so that large messages of many calls are not there at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from etfarm.server.workers.fair_slots import FairSlots
from etfarm.wire.errors import error_for

AT_ONCE: Final = 4
"""Number of messages of one owner that are received and passed on at a time."""
SLOW: Final = 4
"""Number of further messages of one owner, of those that have taken longer than `SLOW_S`: links may be slow or dead."""
SLOW_S: Final = 0.5
ALL: Final = 64
"""Number of messages of all owners. No account has more than it leaves to others: a half, if it is alone."""
LIMIT_S: Final = 120.0
"""Time limit of one message."""


class Turns:
    """The turns of all callers. gRPC does not reveal the size of a message before it has been received, so each counts alike."""

    def __init__(self, slow_s: float = SLOW_S, limit_s: float = LIMIT_S) -> None:
        self._slow_s, self._limit_s = slow_s, limit_s
        self._all = FairSlots(ALL, keeps_room=True)
        self._owners: dict[str, asyncio.Semaphore] = {}
        self._calls: Counter[str] = Counter()
        self._slow: Counter[str] = Counter()

    @asynccontextmanager
    async def take(self, owner: str, account: str = "") -> AsyncIterator[None]:
        """Hold a turn while a message is received and passed on.

        Args:
            account: who shares the turns of all with other accounts, at all of its addresses; the owner by default.

        Raises:
            MESSAGE_OVERDUE: it takes too long.
        """
        self._calls[owner] += 1
        turns, is_lent = self._owners.setdefault(owner, asyncio.Semaphore(AT_ONCE)), False

        def lend() -> None:
            nonlocal is_lent
            if self._slow[owner] < SLOW:
                self._slow[owner] += 1
                is_lent = True
                turns.release()

        try:
            await turns.acquire()
            lending = asyncio.get_running_loop().call_later(self._slow_s, lend)
            try:
                async with self._all.take(account or owner), asyncio.timeout(self._limit_s):
                    yield
            except TimeoutError:
                raise error_for(
                    "MESSAGE_OVERDUE",
                    f"A message of the call did not arrive within {self._limit_s:g} s.",
                    "Try again over a faster connection.",
                    limit_s=self._limit_s,
                ) from None
            finally:
                lending.cancel()
                if is_lent:
                    self._slow[owner] -= 1
                else:
                    turns.release()
        finally:
            self._calls[owner] -= 1
            if not self._calls[owner]:
                del self._calls[owner], self._owners[owner]
                self._slow.pop(owner, None)
