"""The delivery of stored notices: one task decides, and a thread for each try waits for its receiver."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Final

import structlog

from etfarm.server.notices.addresses import parse
from etfarm.server.notices.errors import BadWebhook
from etfarm.server.notices.outbox import Due, Outbox
from etfarm.server.notices.posting import Outcome, Poster

log = structlog.get_logger()

CONCURRENT: Final = 8
"""Maximum number of tries at the same time."""
FOR_ONE: Final = 2
"""Maximum number of tries at the same time for one receiver, so that one that hangs does not delay the others."""

_IDLE_S: Final = 30.0
"""Longest pause between two looks into the outbox."""
_AFTER_FAILURE_S: Final = 5.0
_TRIM_AFTER: Final = 100
"""Number of ended deliveries after which the log is trimmed."""


class Sender:
    """The task that sends what the outbox holds.

    Args:
        now: returns the current time in UTC.
    """

    def __init__(self, outbox: Outbox, poster: Poster, now: Callable[[], datetime]) -> None:
        self._outbox = outbox
        self._poster = poster
        self._now = now
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._receivers: Counter[str] = Counter()
        self._ended = 0
        self._tried = asyncio.Condition()

    async def run(self) -> None:
        """Send notices until the task is cancelled; what is being sent then is sent again after the next start."""
        try:
            while True:
                self._outbox.has_news.clear()
                try:
                    pause_s = await self._start_due()
                except Exception:
                    log.exception("the outbox of notices cannot be read; it is tried again")
                    pause_s = _AFTER_FAILURE_S
                try:
                    async with asyncio.timeout(pause_s):
                        await self._outbox.has_news.wait()
                except TimeoutError:
                    continue
        finally:
            for task in self._sending.values():
                task.cancel()
            await asyncio.gather(*self._sending.values(), return_exceptions=True)

    async def tried(self, number: int, timeout_s: float) -> None:
        """Wait until a delivery has been tried, or the time is over."""

        async def wait() -> None:
            async with self._tried:
                while (row := await self._outbox.delivery(number)) is not None and not row.attempts:
                    await self._tried.wait()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            return

    async def _start_due(self) -> float:
        """Start as many tries as may run; return the seconds until the next look."""
        if (room := CONCURRENT - len(self._sending)) <= 0:
            return _IDLE_S  # the end of a try wakes the task
        full = [receiver for receiver, count in self._receivers.items() if count >= FOR_ONE]
        due, following = await self._outbox.due(room, self._sending.keys(), full)
        for each in due:
            if self._receivers[each.receiver] < FOR_ONE:
                self._receivers[each.receiver] += 1
                self._sending[each.number] = asyncio.create_task(self._send(each), name=f"notice-{each.number}")
        if due:
            return 0.0  # receivers with room may have more
        return _IDLE_S if following is None else min(max((following - self._now()).total_seconds(), 0.05), _IDLE_S)

    async def _send(self, due: Due) -> None:
        try:
            outcome = await self._try(due)
            is_last = await self._outbox.ended(due.number, outcome)
            if outcome.error:
                log.warning(
                    "a notice was not delivered", event_name=due.event, number=due.number, tries=due.attempts + 1,
                    again=not is_last, why=outcome.error,
                )  # fmt: skip
            self._ended += 1
            if self._ended % _TRIM_AFTER == 0:
                await self._outbox.trim()
        except Exception:
            log.exception("what came of a notice could not be stored; it is sent again", number=due.number)
            await asyncio.sleep(_AFTER_FAILURE_S)
        finally:
            del self._sending[due.number]
            self._receivers[due.receiver] -= 1
            if not self._receivers[due.receiver]:
                del self._receivers[due.receiver]
            self._outbox.has_news.set()
        async with self._tried:
            self._tried.notify_all()

    async def _try(self, due: Due) -> Outcome:
        try:
            target = parse(due.url)
        except BadWebhook as error:
            return Outcome(error=error.message, is_final=True)
        headers = {"X-Etfarm-Event": due.event, "X-Etfarm-Delivery": due.event_id}
        time_s = int(self._now().timestamp())
        return await _in_thread(lambda: self._poster.post(target, due.body.encode(), due.secret, time_s, headers))


async def _in_thread(work: Callable[[], Outcome]) -> Outcome:
    """Run blocking work in a thread that does not keep the process alive: a resolver may block for a minute."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Outcome] = loop.create_future()

    def run() -> None:
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 - the top of a thread
            outcome = Outcome(error=f"The server failed to send: {type(error).__name__}: {error}.")
        try:
            loop.call_soon_threadsafe(_set, result, outcome)
        except RuntimeError:
            return  # the server has ended

    threading.Thread(target=run, name="notice", daemon=True).start()
    return await result


def _set(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
