"""Feeds of live values: gathered messages, positions, snapshots, and bounded memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError, Kind, UserError
from etfarm.client.web import live
from etfarm.client.web.live import Feed, FeedEnded, Feeds, Topic
from tests.support.refusals import refuses

WAIT_S = 60.0


class Source:
    """A topic whose values a test changes."""

    def __init__(self, values: Mapping[str, Any], max_items: int) -> None:
        self.values = values
        self.changes: asyncio.Queue[tuple[str, Any | None] | EtfarmError] = asyncio.Queue()
        self.refusals = 0
        topic = Topic("things", "row", self._load, self._watch, "summary", lambda before, after: after == "minor", max_items)
        self.feed = Feed(topic, "", cast(AsyncFarm, None), self._render, self._refuse)

    @staticmethod
    def _render(name: str, **values: Any) -> str:
        return f"<b>{values['item']}</b>" if name == "row" else f"{len(values['items'])} things"

    async def _load(self, _: AsyncFarm, argument: str) -> Mapping[str, Any]:
        return self.values

    async def _watch(self, _: AsyncFarm, argument: str) -> AsyncIterator[tuple[str, Any | None]]:
        while True:
            change = await self.changes.get()
            if isinstance(change, EtfarmError):
                raise change
            yield change
            self.changes.task_done()

    def _refuse(self) -> None:
        self.refusals += 1


@asynccontextmanager
async def opened(*, max_items: int = 1_000, **values: Any) -> AsyncIterator[Source]:
    """A source whose feed is ready."""
    source = Source({"a": 1, "b": 2} | values, max_items)
    await source.feed.ready()
    yield source
    await source.feed.close()


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    async with opened() as source:
        yield source


async def next_messages(feed: Feed, position: str) -> list[dict[str, Any]]:
    """Return the next messages after a position."""
    changed = asyncio.Event()
    async with asyncio.timeout(WAIT_S):
        with feed.listen(changed):
            while not (messages := feed.messages(position)):
                changed.clear()
                await changed.wait()
    return [json.loads(message.decode().partition("data: ")[2]) for message in messages]


async def sent(source: Source, *changes: tuple[str, Any | None]) -> dict[str, Any]:
    """Return the message with these changes."""
    position = source.feed.position
    for change in changes:
        source.changes.put_nowait(change)
    (message,) = await next_messages(source.feed, position)
    return message


async def test_changes_in_a_moment_are_one_message_with_the_last_value(source: Source) -> None:
    message = await sent(source, *(("a", value) for value in range(50)), ("b", None))
    assert (message["rows"], message["removed"], message["is_reset"]) == ([["a", "<b>49</b>"]], ["b"], False)


async def test_a_change_after_a_pause_is_sent_at_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "URGENT_S", 3_600.0)
    assert (await sent(source, ("a", "first")))["rows"] == [["a", "<b>first</b>"]]
    source.changes.put_nowait(("a", "second"))
    changed = asyncio.Event()
    with source.feed.listen(changed):
        await source.changes.join()
        assert not changed.is_set(), "what follows soon is gathered"
        assert source.feed.items["a"] == "second", "who reads the values has it published"
        assert changed.is_set()


async def test_a_summary_is_sent_when_it_has_changed(source: Source) -> None:
    changes = (("a", 3), ("a", 4), ("c", 5), ("b", 6), ("b", None))
    summaries = [(await sent(source, change)).get("summary") for change in changes]
    assert summaries == ["2 things", None, "3 things", None, "2 things"]
    (snapshot,) = await next_messages(source.feed, "")
    assert snapshot["summary"] == "2 things"


async def test_an_unknown_or_old_position_gets_a_snapshot(source: Source) -> None:
    old = source.feed.position
    for place in range(live.MAX_MESSAGES + 1):
        await sent(source, ("a", f"value {place}"))
    for position in ("", "things@0000.3", old, f"{old.partition('.')[0]}.99999", "things@x"):
        (snapshot,) = await next_messages(source.feed, position)
        assert snapshot["is_reset"]
        assert [key for key, _ in snapshot["rows"]] == ["a", "b"]


async def test_a_stream_that_comes_back_gets_what_it_has_missed(source: Source) -> None:
    position = source.feed.position
    for value in ("x", "y"):
        await sent(source, ("a", value))
    missed = [message["rows"] for message in await next_messages(source.feed, position)]
    assert missed == [[["a", "<b>x</b>"]], [["a", "<b>y</b>"]]]


async def test_the_oldest_values_leave_for_new_ones() -> None:
    async with opened(max_items=3) as source:
        for place in range(10_000):
            source.changes.put_nowait((f"new {place}", place))
        position = source.feed.position
        removed: set[str] = set()
        while "new 9999" not in source.feed.items:
            for message in await next_messages(source.feed, position):
                removed |= set(message["removed"])
            position = source.feed.position
        assert list(source.feed.items) == ["new 9997", "new 9998", "new 9999"]
        assert {"a", "b"} <= removed


async def test_a_refused_token_ends_the_account_and_a_closed_feed_its_streams(source: Source) -> None:
    error = UserError("The token was revoked.")
    error.kind = Kind.UNAUTHENTICATED
    position = source.feed.position
    source.changes.put_nowait(error)
    (message,) = await next_messages(source.feed, position)
    assert message["error"] == "The token was revoked."
    assert source.refusals == 1
    await source.feed.close()
    with pytest.raises(FeedEnded):
        source.feed.messages(source.feed.position)


async def test_a_farm_that_is_away_is_shown_until_it_is_back(source: Source) -> None:
    for is_away, error in ((True, live.FARM_AWAY), (False, None)):
        position = source.feed.position
        source.feed.show_connection(is_away=is_away)
        (message,) = await next_messages(source.feed, position)
        assert message["error"] == error


async def test_a_change_that_does_not_show_is_not_sent(source: Source) -> None:
    (snapshot,) = await next_messages(source.feed, "")
    message = await sent(source, ("a", "1"), ("b", "3"))  # the first is another value with the same fragment
    assert snapshot["rows"] == [["a", "<b>1</b>"], ["b", "<b>2</b>"]]
    assert message["rows"] == [["b", "<b>3</b>"]]


async def test_an_age_that_differs_is_no_change() -> None:
    async with opened(a='<time datetime="1">now</time>') as source:
        message = await sent(source, ("a", '<time datetime="1">5 s ago</time>'), ("b", 3))
        assert [key for key, _ in message["rows"]] == ["b"]
        message = await sent(source, ("a", '<time datetime="2">now</time>'))
        assert [key for key, _ in message["rows"]] == ["a"], "another instant is a change"


class Connected:
    """A client whose farm answers."""

    async def watch_connection(self) -> AsyncIterator[bool]:
        yield True
        await asyncio.Event().wait()


@pytest.mark.remedy("TOO_MANY_FEEDS")
async def test_feeds_in_use_are_bounded_and_unused_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_FEEDS", 2)

    async def load(_: AsyncFarm, argument: str) -> Mapping[str, Any]:
        return {"a": argument}

    async def watch(_: AsyncFarm, argument: str) -> AsyncIterator[tuple[str, Any | None]]:
        await asyncio.Event().wait()
        yield "a", None

    topic = Topic("job", "row", load, watch)
    feeds = Feeds(cast(AsyncFarm, Connected()), lambda name, **values: str(values["item"]), lambda: None)
    first, second = await feeds.open(topic, "1"), await feeds.open(topic, "2")
    with first.listen(asyncio.Event()):
        with second.listen(asyncio.Event()):
            with refuses("TOO_MANY_FEEDS"):
                await feeds.open(topic, "3")
            assert await feeds.open(topic, "2") is second
        assert (await feeds.open(topic, "3")).items == {"a": "3"}
        assert second.is_ended and not first.is_ended
    await feeds.close()
