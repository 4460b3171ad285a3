"""Live values of a farm: one watch per account and topic, whose changes all streams of that account share.

A `Feed` reads a Watch stream of the farm, renders what changed once, and keeps the last messages in a ring. A stream of
server-sent events only remembers its position in the ring; one that has fallen behind, or comes back too late, gets a snapshot.
So neither a slow browser nor a thousand events make anything grow.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError, Kind
from etfarm.wire.errors import error_for

MAX_MESSAGES: Final = 128
"""Number of messages in a feed's ring; a stream that is further behind gets a snapshot."""
MAX_MESSAGE_BYTES: Final = 1 << 20
"""Maximum size of a ring's messages together, but for the last one."""
MAX_FEEDS: Final = 128
"""Maximum number of an account's feeds; the one without a stream for longest ends for a new one."""
URGENT_S: Final = 0.02
"""Minimum pause between two messages: a change after a longer one is sent at once, and those within it are one message."""
MINOR_S: Final = 1.0
"""Seconds in which minor changes, such as telemetry, are gathered into one message."""
LINGER_S: Final = 30.0
"""Seconds for which a feed without streams continues: the next page continues it."""
RETRY_S: Final = 2.0
"""Pause before a feed connects to a farm again that it has lost."""

FARM_AWAY: Final = "The farm's server does not answer. The page goes on when it is back."

_AGE: Final = re.compile(r"(?<=>)[^<]*(?=</time>)")
"""The words of an age, such as `12 s ago`, which pages keep current by themselves."""

log = logging.getLogger(__name__)

Render = Callable[..., str]
"""Renders a fragment: its template's name, and its values."""


@dataclass(frozen=True)
class Topic:
    """Something that pages show live: where its values come from, and how they look.

    A value has a key, which does not change; `template` renders one with `item`, and its outermost element has that key as the
    attribute `data-key`.
    """

    name: str
    """Name in addresses: `devices`; with an argument, `device:ID`."""
    template: str
    load: Callable[[AsyncFarm, str], Awaitable[Mapping[str, Any]]]
    """Returns the values by key, in the order that pages show. Its second argument is the topic's, empty without one."""
    watch: Callable[[AsyncFarm, str], AsyncIterator[tuple[str, Any | None]]]
    """Yields the key and the value of what has changed, or the key and None for what is gone. If it ends, so does the feed."""
    summary: str = ""
    """Template of a fragment over all values, which it has as `items`; empty without one."""
    is_minor: Callable[[Any, Any], bool] = lambda before, after: False
    """Whether the change of a value may be shown up to a second later."""
    max_items: int = 1_000
    """Number of values that are kept; the oldest ones leave for new ones."""


class FeedEnded(Exception):
    """The feed has ended: the visitor has signed out, or the farm refuses the token."""


class Feed:
    """The current values of a topic, and the last messages about them."""

    def __init__(self, topic: Topic, argument: str, farm: AsyncFarm, render: Render, on_refused: Callable[[], None]) -> None:
        """Prepare a feed; `Feeds.open` creates and starts instances.

        Args:
            on_refused: called if the farm no longer accepts the account's token.
        """
        self.name = f"{topic.name}:{argument}" if argument else topic.name
        self._topic = topic
        self._argument = argument
        self._farm = farm
        self._render = render
        self._on_refused = on_refused
        self._epoch = secrets.token_hex(4)
        self._sequence = 0
        self._items: dict[str, Any] = {}
        self._rendered: dict[str, str] = {}
        """The fragments of current values, as far as they are rendered."""
        self._dirty: dict[str, str | None] = {}
        """The values that have changed since the last message, each with its former look; None for a new value."""
        self._messages: deque[bytes] = deque()
        self._size_bytes = 0
        self._snapshot: bytes | None = None
        self._summary = ""
        """The summary in the last message that had one; empty if streams have another."""
        self._listeners: set[asyncio.Event] = set()
        self._publishing: asyncio.TimerHandle | None = None
        self._published_s = -math.inf
        """The event loop's time of the last message of changes."""
        self._error: EtfarmError | None = None
        self._is_farm_away = False
        self._loaded = asyncio.Event()
        self.is_ended = False
        self.idle_since_s: float | None = None
        """The event loop's time since when no stream uses the feed; None while one does."""
        self._task = asyncio.create_task(self._run(), name=f"feed {self.name}")

    async def ready(self) -> None:
        """Wait until the values are loaded.

        Raises:
            EtfarmError: the farm refused.
        """
        await self._loaded.wait()
        if self._error is not None and not self._items:
            raise self._error

    @property
    def items(self) -> Mapping[str, Any]:
        """The current values by key, as of `position`."""
        self._settle()
        return self._items

    def rows(self, keys: Iterable[str] | None = None) -> list[Markup]:
        """Return the fragments of some current values, or of all, as of `position`; a fragment is rendered once for all pages."""
        self._settle()
        return [Markup(self._fragment(key)) for key in (self._items if keys is None else keys)]

    @property
    def position(self) -> str:
        """The position behind the last message, which `messages` takes."""
        self._settle()
        return f"{self.name}@{self._epoch}.{self._sequence}"

    def messages(self, position: str) -> list[bytes]:
        """Return the messages after a position; a snapshot alone if the position is unknown or too old.

        Raises:
            FeedEnded: there will be no more messages.
        """
        self._settle()
        epoch, _, number = position.rpartition("@")[2].partition(".")
        behind = self._sequence - int(number) if epoch == self._epoch and number.isascii() and number.isdigit() else -1
        if behind == 0:
            if self.is_ended:
                raise FeedEnded
            return []
        if 0 < behind <= len(self._messages):
            return list(self._messages)[-behind:]
        if self._snapshot is None:
            self._snapshot = self._compose(self._items, (), is_reset=True)
        return [self._snapshot]

    def error_message(self) -> bytes | None:
        """Return a message that the values may be old, for a stream that begins; None if they are current."""
        return self._compose({}, ()) if self._error is not None or self._is_farm_away else None

    @contextmanager
    def listen(self, event: asyncio.Event) -> Iterator[None]:
        """Set `event` whenever there is a message, until the block ends."""
        self._listeners.add(event)
        self.idle_since_s = None
        try:
            yield
        finally:
            self._listeners.discard(event)
            if not self._listeners:
                self.idle_since_s = asyncio.get_running_loop().time()

    def show_connection(self, *, is_away: bool) -> None:
        """Tell all streams whether the farm's server answers."""
        if is_away is not self._is_farm_away:
            self._is_farm_away = is_away
            self._append(self._compose({}, ()))

    async def close(self) -> None:
        """End the feed and every stream of it."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._publishing is not None:
            self._publishing.cancel()
        self._end()

    def _end(self) -> None:
        self.is_ended = True
        self._loaded.set()
        for listener in self._listeners:
            listener.set()

    async def _run(self) -> None:
        while True:
            try:
                self._replace(await self._topic.load(self._farm, self._argument))
                self._loaded.set()
                async for key, value in self._topic.watch(self._farm, self._argument):
                    self._take(key, value)
                self._end()
                return
            except EtfarmError as error:
                self._lose(error)
                if error.kind is Kind.UNAUTHENTICATED:
                    self._on_refused()
                    return
                if error.kind in (Kind.NOT_FOUND, Kind.PERMISSION_DENIED, Kind.INVALID_ARGUMENT):
                    self._end()
                    return
            except Exception:
                log.exception("the feed %s failed and starts again", self.name)
                self._lose(EtfarmError("The page failed to read the farm.", "It tries again by itself."))
            await asyncio.sleep(RETRY_S)

    def _replace(self, values: Mapping[str, Any]) -> None:
        """Take all values at once: when the feed starts, and when the farm is back."""
        is_changed = self._error is not None or self._items != values
        self._error = None
        if is_changed:
            self._items = dict(values)
            self._rendered.clear()
            self._dirty.clear()
            self._messages.clear()
            self._summary = ""
            self._size_bytes = 0
            self._sequence += 1
            self._snapshot = None
            self._notify()

    def _take(self, key: str, value: Any | None) -> None:
        before = self._items.get(key)
        if before == value:
            return
        self._mark_dirty(key)
        if value is None:
            del self._items[key]
        else:
            self._items[key] = value
            if len(self._items) > self._topic.max_items:
                oldest = next(iter(self._items))
                self._mark_dirty(oldest)
                del self._items[oldest]
        is_minor = before is not None and value is not None and self._topic.is_minor(before, value)
        now_s = asyncio.get_running_loop().time()
        self._publish_at(now_s + MINOR_S if is_minor else max(now_s, self._published_s + URGENT_S))

    def _mark_dirty(self, key: str) -> None:
        """Remember how a value looks before its first change since the last message."""
        if key not in self._dirty:
            self._dirty[key] = self._look(key) if key in self._items else None
        self._rendered.pop(key, None)

    def _settle(self) -> None:
        """Publish what has changed, so that the values are those of the last position."""
        if self._publishing is not None:
            self._publishing.cancel()
            self._publish()

    def _lose(self, error: EtfarmError) -> None:
        self._error = error
        self._loaded.set()
        self._append(self._compose({}, ()))

    def _publish_at(self, at_s: float) -> None:
        if self._publishing is not None:
            if self._publishing.when() <= at_s:
                return
            self._publishing.cancel()
        self._publishing = asyncio.get_running_loop().call_at(at_s, self._publish)

    def _publish(self) -> None:
        self._publishing = None
        self._published_s = asyncio.get_running_loop().time()
        dirty, self._dirty = self._dirty, {}
        removed = [key for key, before in dirty.items() if key not in self._items and before is not None]
        # A change that does not show, such as a heartbeat's time, is not sent.
        changed = {key: self._items[key] for key, before in dirty.items() if key in self._items and self._look(key) != before}
        self._snapshot = None
        if changed or removed:
            self._append(self._compose(changed, removed))

    def _append(self, message: bytes) -> None:
        self._messages.append(message)
        self._size_bytes += len(message)
        while len(self._messages) > MAX_MESSAGES or (len(self._messages) > 1 and self._size_bytes > MAX_MESSAGE_BYTES):
            self._size_bytes -= len(self._messages.popleft())
        self._sequence += 1
        self._snapshot = None
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener.set()

    def _fragment(self, key: str) -> str:
        fragment = self._rendered.get(key)
        if fragment is None:
            fragment = self._rendered[key] = self._render(self._topic.template, item=self._items[key])
        return fragment

    def _look(self, key: str) -> str:
        """Return the fragment of a value without ages, which differ whenever it is rendered."""
        return _AGE.sub("", self._fragment(key))

    def _compose(self, values: Mapping[str, Any], removed: Collection[str], *, is_reset: bool = False) -> bytes:
        rows = [[key, self._fragment(key)] for key in values]
        error = self._error.message if self._error is not None else FARM_AWAY if self._is_farm_away else None
        content: dict[str, Any] = {"rows": rows, "removed": list(removed), "error": error, "is_reset": is_reset}
        if self._topic.summary and is_reset:
            content["summary"] = self._render(self._topic.summary, items=self._items)
        elif self._topic.summary and (rows or removed):
            summary = self._render(self._topic.summary, items=self._items)
            if summary != self._summary:
                content["summary"] = self._summary = summary
        return _event(self.name, content)


class Feeds:
    """The feeds of one account."""

    def __init__(self, farm: AsyncFarm, render: Render, on_refused: Callable[[], None]) -> None:
        """Prepare without feeds; see `Feed`."""
        self._farm = farm
        self._render = render
        self._on_refused = on_refused
        self._feeds: dict[str, Feed] = {}
        self._is_away = False
        self._is_closed = False
        self._watching = asyncio.create_task(self._watch_connection(), name="connection of the farm")

    async def open(self, topic: Topic, argument: str = "") -> Feed:
        """Return the topic's feed with its values loaded; it starts if it does not run.

        Raises:
            EtfarmError: the farm refused the values.
            TOO_MANY_FEEDS: streams use as many feeds as an account may have.
            FeedEnded: the account has signed out.
        """
        await self.end_unused()
        if self._is_closed:
            raise FeedEnded
        name = f"{topic.name}:{argument}" if argument else topic.name
        feed = self._feeds.get(name)
        if feed is None or feed.is_ended:
            if len(self._feeds) >= MAX_FEEDS:
                raise error_for(
                    "TOO_MANY_FEEDS", f"Open pages show {MAX_FEEDS} jobs and devices live.", "Close other tabs.", limit=MAX_FEEDS
                )
            feed = Feed(topic, argument, self._farm, self._render, self._on_refused)
            feed.idle_since_s = asyncio.get_running_loop().time()
            feed.show_connection(is_away=self._is_away)
            self._feeds[name] = feed
        await feed.ready()
        return feed

    async def end_unused(self) -> None:
        """End the feeds that no stream has used for a while, and the one unused for longest if there are too many."""
        now = asyncio.get_running_loop().time()
        idle = sorted(
            (feed for feed in self._feeds.values() if feed.idle_since_s is not None), key=lambda feed: feed.idle_since_s or 0
        )
        too_many = max(0, len(self._feeds) - MAX_FEEDS + 1)
        for index, feed in enumerate(idle):
            if index < too_many or feed.is_ended or now - (feed.idle_since_s or now) > LINGER_S:
                self._feeds.pop(feed.name, None)
                await feed.close()

    async def close(self) -> None:
        """End all feeds and their streams."""
        self._is_closed = True
        self._watching.cancel()
        await asyncio.wait({self._watching})
        feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            await feed.close()

    async def _watch_connection(self) -> None:
        async for is_connected in self._farm.watch_connection():
            self._is_away = not is_connected
            for feed in self._feeds.values():
                feed.show_connection(is_away=self._is_away)


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    """Return an event without its id, which belongs to a stream. JSON has no line breaks, which would end the data."""
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
