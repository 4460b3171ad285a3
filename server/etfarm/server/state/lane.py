"""The thread of a database connection. Where several functions wait for it, they share a transaction and thus a commit."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from sqlalchemy import Connection

T = TypeVar("T")

SHARE_S: Final = 0.005
"""Time after which further functions go into the next transaction, so that none waits long for the commit."""


@dataclass(frozen=True, eq=False)
class Work:
    """A function that waits for the thread."""

    do: Callable[[Connection], Any]
    durable: bool
    """Whether the commit waits for the disk."""
    result: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    since_s: float = field(default_factory=time.monotonic)
    """When it began to wait, by the monotonic clock."""


@dataclass(frozen=True)
class Outcome:
    """What a function returned, or the error that it ended with."""

    value: Any = None
    error: BaseException | None = None


class NotBegun(Exception):
    """A function that has waited for the thread for too long, and was not run."""


class Transactor(Protocol):
    """A connection that runs functions in transactions. Only the lane's thread uses it."""

    def transact(self, batch: Sequence[Work]) -> list[Outcome]:
        """Run functions in one transaction, in order, and return their outcomes; an error that is raised is that of all.

        The outcomes may be those of the first functions only, at least of one. The others follow in the next transaction.
        """

    def close(self) -> None:
        """Disconnect."""


class Lane:
    """A thread with one connection.

    Args:
        most: maximum number of functions that share a transaction.
    """

    def __init__(self, transactor: Transactor, name: str, *, most: int = 1) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._transactor = transactor
        self._most = most
        self._waiting: deque[Work] = deque()
        self._is_called = False
        """Whether the thread will look for functions that wait."""

    async def run(self, do: Callable[[Connection], T], *, durable: bool = False, wait_s: float | None = None) -> T:
        """Run `do` in a transaction, in order, and return its result once that is committed.

        A function that fails leaves nothing. An error that undoes the transaction, such as a full disk, is that of all
        functions that share it.

        Args:
            durable: whether the commit waits for the disk.
            wait_s: how long `do` waits for the thread; None for as long as it takes.

        Raises:
            NotBegun: the thread was busy for that long. `do` does not run any more.
        """
        loop = asyncio.get_running_loop()
        work = Work(do, durable, loop.create_future(), loop)
        self._waiting.append(work)
        if not self._is_called:
            self._is_called = True
            try:
                self.thread.submit(self._work_off)
            except RuntimeError:
                self._is_called = False  # closed: further work must be refused as well, not wait
                raise
        timer = None if wait_s is None else loop.call_later(wait_s, self._give_up, work)
        try:
            result: T = await work.result
        finally:
            if timer is not None:
                timer.cancel()
        return result

    def _give_up(self, work: Work) -> None:
        # Either this or the thread removes it from the queue, never both.
        with suppress(ValueError):
            self._waiting.remove(work)
            work.result.set_exception(NotBegun())

    def close(self) -> None:
        """End the thread after the functions that wait for it."""
        self.thread.submit(self._transactor.close).result()
        self.thread.shutdown()

    def _work_off(self) -> None:
        """Run all functions that wait, in as few transactions as possible."""
        # Before they are taken: a function that comes later has a call of its own.
        self._is_called = False
        while batch := self._take():
            try:
                outcomes = self._transactor.transact(batch)
            except BaseException as error:  # noqa: BLE001 - the callers' error
                outcomes = [Outcome(error=error)] * len(batch)
            self._waiting.extendleft(reversed(batch[len(outcomes) :]))
            batch[0].loop.call_soon_threadsafe(_deliver, batch[: len(outcomes)], outcomes)

    def _take(self) -> list[Work]:
        batch: list[Work] = []
        while self._waiting and len(batch) < self._most:
            work = self._waiting.popleft()
            if not work.result.cancelled():
                batch.append(work)
        return batch


def _deliver(batch: list[Work], outcomes: list[Outcome]) -> None:
    for work, outcome in zip(batch, outcomes, strict=True):
        if work.result.done():
            continue  # its caller was cancelled
        if outcome.error is None:
            work.result.set_result(outcome.value)
        elif isinstance(outcome.error, StopIteration):
            work.result.set_exception(RuntimeError("the function raised StopIteration"))  # which a future refuses
        else:
            work.result.set_exception(outcome.error)
