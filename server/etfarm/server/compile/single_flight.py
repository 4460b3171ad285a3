"""Shared work: equal requests that arrive at the same time are done once, and all requesters receive the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from etfarm.server.workers.child_pool import OnTurn

T = TypeVar("T")


class StageCallback(Protocol):
    """A callback for the start of a stage, with None, and for its end, with its duration in milliseconds."""

    def __call__(self, stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
        """Handle a stage. `cached` means that an earlier compilation did the stage and took `duration_ms` for it."""


@dataclass(frozen=True)
class Listener:
    """The callbacks of one requester that waits for a compilation."""

    on_stage: StageCallback
    on_log: Callable[[str], None]
    """Called with each line that a child prints."""
    on_turn: OnTurn = lambda has_turn: None
    """Called with False when the work begins to wait for its turn among the workers, and with True when it has it."""


@dataclass
class Subscribers:
    """All requesters that wait for the same work. Has the callbacks of a Listener, which call those of each requester."""

    listeners: list[Listener] = field(default_factory=list)
    latest: tuple[str, float | None, bool] | None = None
    has_turn: bool | None = None

    def add(self, listener: Listener) -> None:
        """Add a requester and report the work's current stage to it."""
        self.listeners.append(listener)
        if self.has_turn is not None:
            listener.on_turn(self.has_turn)
        if self.latest is not None:
            stage, duration_ms, cached = self.latest
            listener.on_stage(stage, duration_ms, cached=cached)

    def on_stage(self, stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
        """Report a stage to all requesters."""
        self.latest = stage, duration_ms, cached
        for listener in self.listeners:
            listener.on_stage(stage, duration_ms, cached=cached)

    def on_log(self, line: str) -> None:
        """Report a log line to all requesters."""
        for listener in self.listeners:
            listener.on_log(line)

    def on_turn(self, has_turn: bool) -> None:
        """Report to all requesters that the work waits for its turn, or has it."""
        self.has_turn = has_turn
        for listener in self.listeners:
            listener.on_turn(has_turn)

    @property
    def listener(self) -> Listener:
        """A Listener that represents all requesters where this work waits for other work."""
        return Listener(self.on_stage, self.on_log, self.on_turn)


@dataclass
class _Work(Generic[T]):
    task: asyncio.Task[T]
    subscribers: Subscribers
    waiting: int = 0


class SingleFlight(Generic[T]):
    """Work in progress by key.

    Args:
        name: prefix of the asyncio tasks' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[str, _Work[T]] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the work in progress."""
        return tuple(self._running)

    async def join(self, keys: Sequence[str], work: Callable[[Subscribers], Awaitable[T]], listener: Listener) -> T:
        """Return the outcome of the first work in progress under one of `keys`; else start `work` under the first key.

        When the last waiting caller is cancelled, the work is cancelled as well, and has ended when this returns.
        """
        running = next((self._running[key] for key in keys if key in self._running), None)
        if running is None:
            running = self._start(keys[0], work)
        running.waiting += 1
        running.subscribers.add(listener)
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            running.subscribers.listeners.remove(listener)
            if not running.waiting and not running.task.done():
                self._forget(running)
                running.task.cancel()
                await asyncio.wait([running.task])

    def _start(self, key: str, work: Callable[[Subscribers], Awaitable[T]]) -> _Work[T]:
        subscribers = Subscribers()

        async def run() -> T:
            return await work(subscribers)

        running = _Work(asyncio.create_task(run(), name=f"{self._name}-{key[:12]}"), subscribers)
        self._running[key] = running
        running.task.add_done_callback(lambda _: self._forget(running))
        return running

    def _forget(self, ended: _Work[T]) -> None:
        for key in [key for key, running in self._running.items() if running is ended]:
            with suppress(KeyError):
                del self._running[key]
