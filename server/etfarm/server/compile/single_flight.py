"""Work under way and who waits for it: equal work that is asked for at one time is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class StageTold(Protocol):
    """Told of a stage: with None when it starts, with its milliseconds when it has ended."""

    def __call__(self, stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
        """`cached`: it was done by an earlier compilation, and took that long then."""


@dataclass(frozen=True)
class Listener:
    """Somebody who waits for a compilation."""

    on_stage: StageTold
    on_log: Callable[[str], None]
    """Told each line that a child prints."""


@dataclass
class Audience:
    """All that wait for one piece of work; is itself told like a Listener."""

    listeners: list[Listener] = field(default_factory=list)
    latest: tuple[str, float | None, bool] | None = None

    def add(self, listener: Listener) -> None:
        """Who comes late is told at once where the work is."""
        self.listeners.append(listener)
        if self.latest is not None:
            stage, duration_ms, cached = self.latest
            listener.on_stage(stage, duration_ms, cached=cached)

    def on_stage(self, stage: str, duration_ms: float | None, *, cached: bool = False) -> None:
        """Tells everybody."""
        self.latest = stage, duration_ms, cached
        for listener in self.listeners:
            listener.on_stage(stage, duration_ms, cached=cached)

    def on_log(self, line: str) -> None:
        """Tells everybody."""
        for listener in self.listeners:
            listener.on_log(line)

    @property
    def listener(self) -> Listener:
        """It, as somebody who waits for other work on behalf of all."""
        return Listener(self.on_stage, self.on_log)


@dataclass
class _Flight(Generic[T]):
    task: asyncio.Task[T]
    audience: Audience
    waiting: int = 0


class Flights(Generic[T]):
    """Work by key."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._flights: dict[str, _Flight[T]] = {}

    async def join(self, keys: Sequence[str], work: Callable[[Audience], Awaitable[T]], listener: Listener) -> T:
        """The outcome of the first work under way that has one of `keys`; otherwise of `work`, which goes under the first.

        A caller who is cancelled ends the work when nobody else waits for it, and then it has ended when this returns.
        """
        flight = next((self._flights[key] for key in keys if key in self._flights), None)
        if flight is None:
            flight = self._begin(keys[0], work)
        flight.waiting += 1
        flight.audience.add(listener)
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            flight.audience.listeners.remove(listener)
            if not flight.waiting and not flight.task.done():
                self._forget(flight)
                flight.task.cancel()
                await asyncio.wait([flight.task])

    def _begin(self, key: str, work: Callable[[Audience], Awaitable[T]]) -> _Flight[T]:
        audience = Audience()

        async def fly() -> T:
            return await work(audience)

        flight = _Flight(asyncio.create_task(fly(), name=f"{self._name}-{key[:12]}"), audience)
        self._flights[key] = flight
        flight.task.add_done_callback(lambda _: self._forget(flight))
        return flight

    def _forget(self, flight: _Flight[T]) -> None:
        for key in [key for key, known in self._flights.items() if known is flight]:
            with suppress(KeyError):
                del self._flights[key]
