"""The farm's notices as other rooms use them: what to tell, the webhooks, and the tasks behind them.

One task decides what is sent, and a thread for each try waits for its receiver.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog
from sqlalchemy import Row

from etfarm.server.notices import events
from etfarm.server.notices.addresses import parse, require_permitted, system_lookup
from etfarm.server.notices.errors import BadWebhook
from etfarm.server.notices.outbox import Due, Outbox
from etfarm.server.notices.posting import Outcome, Poster, tls_context
from etfarm.server.notices.settings import NoticeSettings
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.v1.job_pb2 import Job
from etfarm.wire.shielding import end_tasks

log = structlog.get_logger()

TEST_S: Final = 20.0
"""How long a test waits for its first try."""
_LOOK_S: Final = 15.0
"""Pause between two looks for devices that are offline."""
_LONG_AGO: Final = timedelta(days=7)
"""Devices that have been offline for longer are no news, as after a restart of the server."""
CONCURRENT: Final = 8
"""Maximum number of tries at the same time."""
FOR_ONE: Final = 2
"""Maximum number of tries at the same time for one receiver, so that one that hangs does not delay the others."""

_IDLE_S: Final = 30.0
"""Longest pause between two looks into the outbox."""
_AFTER_FAILURE_S: Final = 5.0
_TRIM_AFTER: Final = 100
"""Number of ended deliveries after which the log is trimmed."""


class Notices:
    """Publication and delivery of the farm's events.

    Args:
        now: returns the current time in UTC.
        version: the server's version.
    """

    def __init__(self, database: Database, settings: NoticeSettings, now: Callable[[], datetime], version: str) -> None:
        self._settings = settings
        self._now = now
        self.outbox = Outbox(database, now)
        poster = Poster(
            settings.allowed, tls_context(settings.authorities), settings.lookup or system_lookup, settings.deadline_s, version
        )
        self.sender = Sender(self.outbox, poster, now)
        self._offline: set[tuple[str, int]] = set()
        """Devices that were reported as offline, with the time when they were last seen."""

    async def load(self) -> None:
        """Store the webhooks of the server's options."""
        for url, _ in self._settings.webhooks:
            require_permitted(parse(url), self._settings.allowed)
        await self.outbox.configure(self._settings.webhooks)

    def require_urls(self, urls: Iterable[str]) -> None:
        """Check a job's addresses for notices.

        Raises:
            BadWebhook: an address is not valid.
            HostRefused: notices do not go to its host. Its name is resolved only when a notice is sent.
        """
        for url in urls:
            require_permitted(parse(url), self._settings.allowed)

    async def add_webhook(self, url: str, on: Sequence[str], by: str) -> tuple[str, str]:
        """Add a webhook; return its id and its secret.

        Raises:
            BadWebhook, HostRefused, TOO_MANY_WEBHOOKS: see WebhookService.Create.
        """
        self.require_urls([url])
        webhook_id = uuid.uuid4().hex[:12]
        return webhook_id, await self.outbox.add(webhook_id, url, events.validate_events(on), by)

    async def test_webhook(self, webhook_id: str) -> Row[Any] | None:
        """Send a test to a webhook; return the row of its delivery after the first try.

        Raises:
            WEBHOOK_NOT_FOUND, TOO_MANY_NOTICES: see WebhookService.Test.
        """
        number = await self.outbox.enqueue_test(webhook_id)
        await self.sender.tried(number, TEST_S)
        return await self.outbox.delivery(number)

    async def gate_failed(self, job: Job, gate: str, failures: Sequence[str]) -> None:
        """Report a gate that a job's result does not pass to the job's addresses and the webhooks.

        Raises:
            TOO_MANY_NOTICES: the job has the maximum number of different reports.
        """
        await self.outbox.publish_gate(events.gate_failed(job, gate, failures, self._now()), job.spec.notify_urls)

    async def device_quarantined(self, device: Device) -> None:
        """Report a device that was quarantined; `device.health` has the reason and the time."""
        since = device.health.start_time.ToDatetime(UTC) if device.health.HasField("start_time") else self._now()
        why = device.health.reason or "its health run failed."
        await self.outbox.publish(events.device_event(events.DEVICE_QUARANTINED, device, self._now(), since, why))

    async def watch_quarantines(
        self,
        on_quarantined: Callable[[Callable[[str], None]], None],
        known: Callable[[Collection[str]], Mapping[str, Device]],
    ) -> None:
        """Report devices that are quarantined from now on, until the task is cancelled.

        Args:
            on_quarantined: registers a function that is called with the id of each device that is quarantined.
            known: returns the known devices with these ids, with their current states.
        """
        quarantined: dict[str, None] = {}
        wake = asyncio.Event()

        def note(device_id: str) -> None:
            quarantined[device_id] = None
            wake.set()

        on_quarantined(note)
        while True:
            await wake.wait()
            wake.clear()
            ids = list(quarantined)
            quarantined.clear()
            for device in known(ids).values():
                try:
                    await self.device_quarantined(device)
                except Exception:
                    log.exception("a quarantined device could not be reported", device=device.id)

    async def watch_offline(self, devices: Callable[[], Sequence[Device]]) -> None:
        """Report devices that have been offline for long, until the task is cancelled.

        Args:
            devices: returns the farm's devices with their current states.
        """
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.report_offline(devices())
            except Exception:
                log.exception("devices that are offline could not be reported")

    async def report_offline(self, devices: Sequence[Device]) -> None:
        """Report each device once that has been offline for longer than the settings say."""
        now, offline = self._now(), set[tuple[str, int]]()
        for device in devices:
            if device.state != DeviceState.DEVICE_STATE_OFFLINE or not device.HasField("last_seen_time"):
                continue
            seen = device.last_seen_time.ToDatetime(UTC)
            if not self._settings.offline_after_s <= (now - seen).total_seconds() <= _LONG_AGO.total_seconds():
                continue
            key = device.id, device.last_seen_time.seconds
            offline.add(key)
            if key not in self._offline:
                minutes = self._settings.offline_after_s / 60
                why = f"last seen at {seen.isoformat(timespec='seconds')}, more than {minutes:g} minutes ago."
                await self.outbox.publish(events.device_event(events.DEVICE_OFFLINE, device, now, seen, why))
        self._offline = offline


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
            await end_tasks(*self._sending.values())

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
