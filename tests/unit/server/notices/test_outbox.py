"""The stored outbox and its sender, on a real database, with real receivers and an injected clock."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection

from etfarm.server.jobs import model
from etfarm.server.jobs.records.journal import Journal
from etfarm.server.jobs.records.watch import Announcer
from etfarm.server.notices import events, outbox
from etfarm.server.notices.addresses import AllowList
from etfarm.server.notices.errors import (
    BadWebhook,
    HostRefused,
)
from etfarm.server.notices.notices import Notices
from etfarm.server.notices.outbox import PAUSES, Outbox
from etfarm.server.notices.settings import NoticeSettings
from etfarm.server.state.engine import Database
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.v1.job_pb2 import Job
from tests.support import jobs, receivers
from tests.support.databases import new_database
from tests.support.databases import opened as opened_database
from tests.support.receivers import raw, receiver, status, statuses
from tests.support.refusals import refuses

pytestmark = pytest.mark.usefixtures("each_database")

ALLOWED = AllowList.of(["127.0.0.1"])


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@asynccontextmanager
async def opened(
    folder: Path, clock: Clock, *, sending: bool = True, settings: NoticeSettings | None = None
) -> AsyncIterator[Notices]:
    """Notices on the database of a folder, which keeps it."""
    async with opened_database(new_database(folder / "farm.sqlite")) as database:
        notices = Notices(database, settings or NoticeSettings(allowed=ALLOWED, deadline_s=60), clock, "9.9")
        await notices.load()
        task = asyncio.create_task(notices.sender.run()) if sending else None
        try:
            yield notices
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def settled(notices: Notices, state: str, number: int = 1, tries: int | None = None) -> None:
    """Wait until a delivery has a state, and a number of tries."""
    async with asyncio.timeout(120):
        while True:
            row = await notices.outbox.delivery(number)
            if row is not None and row.state == state and tries in (None, row.attempts):
                return
            await asyncio.sleep(0.01)


def job(*urls: str, owner: str = "ann") -> Job:
    ended = Job(id="j1", name="nightly", owner=owner, project="default", state=3)
    ended.spec.notify_urls.extend(urls)
    ended.cells.add(index=0, state=6, candidate_name="resnet8", p50_ns=1.5, verdict=2)
    ended.create_time.FromDatetime(datetime(2026, 1, 2, tzinfo=UTC))
    return ended


async def submit(notices: Notices, ended: Job) -> None:
    await notices.outbox._database.write(lambda connection: notices.outbox.hold(connection, ended))


async def end(notices: Notices, ended: Job) -> None:
    await notices.outbox._database.write(lambda connection: notices.outbox.job_ended(connection, ended))
    notices.outbox.has_news.set()


class HeldOutbox(Outbox):
    """An outbox whose transactions that end a job wait for the test."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, Clock())
        self.began = {"a": threading.Event(), "b": threading.Event()}
        self.may_end = {"a": threading.Event(), "b": threading.Event()}

    def job_ended(self, connection: Connection, job: Job) -> None:
        super().job_ended(connection, job)
        self.began[job.id[0]].set()
        assert self.may_end[job.id[0]].wait(20)


async def test_the_end_of_a_job_is_news_though_another_ended_right_before(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock(), sending=False) as notices:
        await notices.add_webhook("http://127.0.0.1:9/", ["job.ended"], "ann")
        database = notices.outbox._database
        held = HeldOutbox(database)
        journal, ends = Journal(database, Announcer(), Clock(), outbox=held), []
        for name in "ab":
            new = await jobs.submit(journal, jobs.queued_job(name * 16, project="default"))
            ends.append(journal.change(model.advance(new.cells[0], model.CANCELLED, at=Clock().now)))
        first = asyncio.create_task(ends[0])
        await asyncio.to_thread(held.began["a"].wait, 20)
        second = asyncio.create_task(ends[1])
        await asyncio.sleep(0)
        held.may_end["a"].set()
        # The event loop learns of the first end only when the second one is about to be committed.
        assert held.began["b"].wait(20)
        await first
        assert held.has_news.is_set()
        held.has_news.clear()  # as the sender does, which does not see the second notice yet
        held.may_end["b"].set()
        await second
        assert held.has_news.is_set()


async def test_a_job_tells_its_addresses_and_the_webhooks_of_the_event_once(tmp_path: Path) -> None:
    with receiver() as own, receiver() as farms, receiver() as others:
        async with opened(tmp_path, Clock()) as notices:
            _, secret = await notices.add_webhook(farms.url(), ["job.ended"], "ann")
            await notices.add_webhook(others.url(), ["device.offline"], "ann")
            await submit(notices, job(own.url(), own.url()))
            assert [row.state for row in await notices.outbox.deliveries(9, None)] == ["HELD"]
            await end(notices, job(own.url()))
            await settled(notices, "DELIVERED", 1)
            await settled(notices, "DELIVERED", 2)
            project_secret = await notices.outbox.secret_of("default")
        assert own.requests.qsize() == farms.requests.qsize() == 1 and others.requests.empty()
        first, second = own.requests.get(), farms.requests.get()
    assert secret != project_secret and first.headers["X-Etfarm-Signature"] != second.headers["X-Etfarm-Signature"]
    assert first.headers["X-Etfarm-Delivery"] == second.headers["X-Etfarm-Delivery"] and first.body == second.body
    document = json.loads(first.body)
    assert (document["schema"], document["event"], document["job"]["state"]) == ("etfarm.notice/1", "job.ended", "SUCCEEDED")
    assert document["job"]["cells"][0] == {
        "index": 0, "model": "resnet8", "recipe": "", "method": None, "state": "SUCCEEDED", "report": None, "p50_ns": 1.5,
        "verdict": "INVALID", "error": None,
    }  # fmt: skip
    assert document["text"] == "Job nightly (j1) of ann succeeded: 1 of 1 cells succeeded, 1 INVALID."


async def test_a_refused_notice_is_tried_again_with_growing_pauses_until_it_is_given_up(tmp_path: Path) -> None:
    clock = Clock()
    with receiver(status(500, "no")) as there:
        async with opened(tmp_path, clock) as notices:
            await notices.add_webhook(there.url(), [], "ann")
            await end(notices, job())
            for tries, pause in enumerate(PAUSES, 1):
                await settled(notices, "PENDING", tries=tries)
                row = await notices.outbox.delivery(1)
                assert row is not None and row.due_at == clock.now + pause and (row.status, row.answer) == (500, "no")
                assert there.requests.qsize() == tries
                clock.now += pause
                notices.outbox.has_news.set()
            await settled(notices, "FAILED", tries=len(PAUSES) + 1)
    assert sum(PAUSES, timedelta()) > timedelta(hours=7)


async def test_a_receiver_that_recovers_gets_the_notice(tmp_path: Path) -> None:
    clock = Clock()
    with receiver(statuses(503, 200)) as there:
        async with opened(tmp_path, clock) as notices:
            await notices.add_webhook(there.url(), [], "ann")
            await end(notices, job())
            await settled(notices, "PENDING", tries=1)
            clock.now += PAUSES[0]
            notices.outbox.has_news.set()
            await settled(notices, "DELIVERED", tries=2)
        assert there.requests.qsize() == 2


async def test_a_restart_loses_nothing_that_waits(tmp_path: Path) -> None:
    clock = Clock()
    with receiver() as own, receiver() as farms:
        async with opened(tmp_path, clock, sending=False) as notices:
            await notices.add_webhook(farms.url(), [], "ann")
            await submit(notices, job(own.url()))
        async with opened(tmp_path, clock, sending=False) as notices:
            await end(notices, job(own.url()))
        async with opened(tmp_path, clock) as notices:
            await settled(notices, "DELIVERED", 1)
            await settled(notices, "DELIVERED", 2)
        assert own.requests.qsize() == farms.requests.qsize() == 1


async def test_a_receiver_that_hangs_does_not_delay_others(tmp_path: Path) -> None:
    settings = NoticeSettings(allowed=ALLOWED, deadline_s=60.0)
    with raw(receivers.hang) as hanging, receiver() as there:
        async with opened(tmp_path, Clock(), settings=settings) as notices:
            for _ in range(12):
                await notices.add_webhook(hanging.url(), ["gate.failed"], "ann")
            await notices.add_webhook(there.url(), ["job.ended"], "ann")
            await notices.outbox.publish(events.gate_failed(job(), "3%", [], Clock()()))
            await end(notices, job())
        # More receivers hang than there are tries at a time: each costs its time limit once.
        async with opened(tmp_path, Clock(), settings=NoticeSettings(allowed=ALLOWED, deadline_s=0.2)) as notices:
            await settled(notices, "DELIVERED", 13)
        assert there.requests.qsize() == 1


async def test_one_owner_cannot_occupy_all_tries(tmp_path: Path) -> None:
    settings = NoticeSettings(allowed=ALLOWED, deadline_s=60.0)
    with raw(receivers.hang) as hanging, receiver() as there:
        async with opened(tmp_path, Clock(), settings=settings) as notices:
            await notices.add_webhook(there.url(), ["job.ended"], "ann")
            for number in range(30):
                notice = events.gate_failed(job(owner="bob"), str(number), [], Clock()())
                await notices.outbox.publish(notice, [hanging.url(f"/{number}")])
            await end(notices, job())
            await settled(notices, "DELIVERED", 31)
        assert there.requests.qsize() == 1


@pytest.mark.remedy("TOO_MANY_NOTICES")
async def test_what_waits_for_a_dead_receiver_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 3)
    async with opened(tmp_path, Clock(), sending=False) as notices:
        webhook_id, _ = await notices.add_webhook("http://127.0.0.1:9/", [], "ann")
        for number in range(5):
            await notices.outbox.publish(events.gate_failed(job(), str(number), [], Clock()()))
        ((row, waiting),) = await notices.outbox.webhooks()
        assert (waiting, row.dropped) == (3, 2)
        with refuses("TOO_MANY_NOTICES"):
            await notices.outbox.enqueue_test(webhook_id)
        await notices.outbox.remove(webhook_id)
        again, _ = await notices.add_webhook("http://127.0.0.1:9/", [], "ann")
        assert await notices.outbox.enqueue_test(again)


async def test_the_log_of_ended_deliveries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "KEPT", 2)
    clock = Clock()
    with receiver() as there:
        async with opened(tmp_path, clock) as notices:
            await notices.add_webhook(there.url(), [], "ann")
            for number in range(1, 5):
                await notices.outbox.publish(events.gate_failed(job(), str(number), [], clock()))
                await settled(notices, "DELIVERED", number)
            await notices.outbox.trim()
            assert [row.number for row in await notices.outbox.deliveries(9, None)] == [4, 3]
            clock.now += outbox.KEPT_FOR + timedelta(days=1)
            await notices.outbox.trim()
            assert await notices.outbox.deliveries(9, None) == []


async def test_equal_gate_reports_are_sent_once_and_different_ones_are_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock(), sending=False) as notices:
        watched = job("http://127.0.0.1:9/")
        for _ in range(3):
            await notices.gate_failed(watched, "--gate 3%", ["slower by 5 %"])
        assert len(await notices.outbox.deliveries(9, None)) == 1
        for number in range(outbox.MAX_GATES - 1):
            await notices.gate_failed(watched, "--gate 3%", [str(number)])
        with refuses("TOO_MANY_NOTICES"):
            await notices.gate_failed(watched, "--gate 3%", ["one more"])


async def test_a_device_that_is_offline_for_long_is_reported_once_and_again_after_it_was_back(tmp_path: Path) -> None:
    clock = Clock()
    device = Device(id="d1", name="board", state=DeviceState.DEVICE_STATE_OFFLINE)
    device.last_seen_time.FromDatetime(clock.now)
    with receiver() as there:
        async with opened(tmp_path, clock) as notices:
            await notices.add_webhook(there.url(), ["device.offline"], "ann")
            clock.now += timedelta(seconds=899)
            await notices.report_offline([device])
            assert await notices.outbox.deliveries(9, None) == []
            clock.now += timedelta(seconds=2)
            await notices.report_offline([device])
            await notices.report_offline([device])
            await settled(notices, "DELIVERED")
        async with opened(tmp_path, clock) as notices:  # a restart does not report it again
            await notices.report_offline([device])
            assert len(await notices.outbox.deliveries(9, None)) == 1
            device.last_seen_time.FromDatetime(clock.now)
            clock.now += timedelta(seconds=901)
            await notices.report_offline([device])
            assert len(await notices.outbox.deliveries(9, None)) == 2
            clock.now += timedelta(days=8)
            long_gone = Device(id="d2", state=DeviceState.DEVICE_STATE_OFFLINE, last_seen_time=device.last_seen_time)
            await notices.report_offline([long_gone])
            assert len(await notices.outbox.deliveries(9, None)) == 2
        document = json.loads(there.requests.get(timeout=60).body)
    assert document["device"]["id"] == "d1" and document["text"].startswith(
        "Device board is offline: last seen at 2026-01-02T03:04:05"
    )


async def test_a_quarantined_device_is_reported_with_the_reason(tmp_path: Path) -> None:
    device = Device(id="d1", name="board")
    device.health.reason = "3 of the last 4 attempts ended in DEVICE_FAULT."
    with receiver() as there:
        async with opened(tmp_path, Clock()) as notices:
            await notices.add_webhook(there.url(), ["device.quarantined"], "ann")
            listeners: list[Callable[[str], None]] = []
            known = {device.id: device}
            work = notices.watch_quarantines(listeners.append, lambda ids: {each: known[each] for each in ids if each in known})
            watching = asyncio.create_task(work)
            await asyncio.sleep(0)
            for device_id in ("forgotten", "d1"):
                listeners[0](device_id)
            document = json.loads((await asyncio.to_thread(there.requests.get, timeout=10)).body)
            watching.cancel()
    assert document["text"] == "Device board is quarantined: 3 of the last 4 attempts ended in DEVICE_FAULT."


@pytest.mark.remedy("WEBHOOK_CONFIGURED")
async def test_webhooks_of_options_follow_the_options_and_are_not_removed_by_commands(tmp_path: Path) -> None:
    def settings(*hooks: str) -> NoticeSettings:
        return NoticeSettings(tuple((f"http://127.0.0.1/{hook}", "s" * 16) for hook in hooks), ALLOWED)

    async with opened(tmp_path, Clock(), sending=False, settings=settings("a", "b")) as notices:
        await notices.add_webhook("http://127.0.0.1/own", [], "ann")
        first = next(row for row, _ in await notices.outbox.webhooks() if row.configured)
        with refuses("WEBHOOK_CONFIGURED"):
            await notices.outbox.remove(first.id)
    async with opened(tmp_path, Clock(), sending=False, settings=settings("b")) as notices:
        assert sorted(row.url for row, _ in await notices.outbox.webhooks()) == ["http://127.0.0.1/b", "http://127.0.0.1/own"]


@pytest.mark.remedy("WEBHOOK_NOT_FOUND")
async def test_a_webhook_that_is_removed_takes_what_waits_along(tmp_path: Path) -> None:
    async with opened(tmp_path, Clock(), sending=False) as notices:
        webhook_id, _ = await notices.add_webhook("http://127.0.0.1:9/", [], "ann")
        await end(notices, job())
        with refuses("WEBHOOK_NOT_FOUND"):
            await notices.outbox.remove("typo")
        ((listed, _),) = await notices.outbox.webhooks()
        await notices.outbox.remove(listed.id)
        assert await notices.outbox.deliveries(9, None) == [] and await notices.outbox.webhooks() == []
        with refuses("WEBHOOK_NOT_FOUND"):
            await notices.outbox.remove(webhook_id)


@pytest.mark.remedy("TOO_MANY_WEBHOOKS")
async def test_bad_webhooks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WEBHOOKS", 1)
    async with opened(tmp_path, Clock(), sending=False) as notices:
        with pytest.raises(BadWebhook, match=r"no event 'job\.started'"):
            await notices.add_webhook("http://127.0.0.1/", ["job.started"], "ann")
        with pytest.raises(HostRefused):
            await notices.add_webhook("http://127.0.0.2/", [], "ann")
        webhook_id, _ = await notices.add_webhook("http://127.0.0.1/", [], "ann")
        with refuses("TOO_MANY_WEBHOOKS"):
            await notices.add_webhook("http://127.0.0.1/2", [], "ann")
        await notices.outbox.remove(webhook_id)
        await notices.add_webhook("http://127.0.0.1/2", [], "ann")


def test_a_document_has_a_bounded_size() -> None:
    large = job()
    large.cells.clear()
    for index in range(1000):
        cell = large.cells.add(index=index, candidate_name="m" * 256, recipe_name="r" * 256)
        cell.error.message = "e" * 30_000
    large.labels.update({f"k{i}": "v" * 200 for i in range(64)})
    notice = events.job_ended(large, Clock()())
    assert len(notice.body) < events.MAX_BODY and json.loads(notice.body)["job"]["cell_count"] == 1000
