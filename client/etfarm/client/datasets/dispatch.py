"""Dispatch of samples to devices, with a few in flight and results in the order of the source.

Every sample that is taken from the source is settled once, or returned to be taken again. No sample is taken that is
further ahead of the next result than the window: one slow device blocks the others, but never fills the memory.
"""

from __future__ import annotations

import asyncio
import heapq
import statistics
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from etfarm.client.datasets.samples import Sample
from etfarm.client.errors import EtfarmError
from etfarm.client.models import Device


@dataclass
class Work:
    """The work of one device."""

    device: Device
    samples: int = 0
    """Number of samples that it completed."""
    busy_ns: int = 0
    """Time in the program in nanoseconds, by the runner's clock."""
    lost: EtfarmError | None = None
    """Why the device runs no more samples; None while it does."""


@dataclass
class Tally:
    """Counts and times so far."""

    devices: dict[str, Work] = field(default_factory=dict)
    """Work by device id."""
    run_ns: array[int] = field(default_factory=lambda: array("q"), repr=False)
    """Time of each executed sample in nanoseconds, as far as devices report it, in no particular order."""
    began_s: float | None = None
    ended_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Seconds from the start of the first sample on a device to the end of the last, by the caller's clock."""
        return self.ended_s - self.began_s if self.began_s is not None else 0.0

    @property
    def samples(self) -> int:
        """Number of completed samples."""
        return sum(work.samples for work in self.devices.values())

    @property
    def samples_per_s(self) -> float | None:
        """Completed samples per second of wall time; None before the first result."""
        return self.samples / self.wall_s if self.wall_s > 0 and self.samples else None

    @property
    def run_p50_ns(self) -> float | None:
        """The median time of a sample on its device, in nanoseconds."""
        return statistics.median(self.run_ns) if self.run_ns else None

    @property
    def busy_share(self) -> float | None:
        """Part of the devices' wall time that their programs ran, 0 to 1; None if a sample's time is missing."""
        there = self.wall_s * len(self.devices)
        if there <= 0 or len(self.run_ns) < self.samples:
            return None
        return sum(work.busy_ns for work in self.devices.values()) / 1e9 / there

    def begin(self) -> None:
        """Record that a sample is sent."""
        if self.began_s is None:
            self.began_s = self.ended_s = time.perf_counter()

    def ran(self, device: Device, run_ns: int | None) -> None:
        """Record a completed sample, with its time in the program if the device reports it."""
        self.ended_s = time.perf_counter()
        work = self.devices[device.id]
        work.samples += 1
        if run_ns is not None:
            self.run_ns.append(run_ns)
            work.busy_ns += run_ns


class Settled(Protocol):
    """The result of a sample."""

    @property
    def index(self) -> int:
        """The sample's index in the source."""

    @property
    def failed(self) -> bool:
        """Whether the sample has no outputs."""


Result = TypeVar("Result", bound=Settled)


class Deal(Generic[Result]):
    """Dispatcher of the samples of one source.

    It is used in one event loop; only the source is read in a thread.
    """

    def __init__(self, source: Iterable[Sample], *, ready: int, window: int, keep_going: bool) -> None:
        """Prepare to read the source.

        Args:
            source: samples with indices from 0.
            ready: maximum number of samples that wait to be taken.
            window: maximum distance of a sample from the next result.
            keep_going: run the samples behind a failed one.
        """
        self._source = iter(source)
        self._ready_limit = ready
        self._window = window
        self._keep_going = keep_going
        self._changed = asyncio.Condition()
        self._ready: list[tuple[int, Sample]] = []
        self._done: dict[int, Result] = {}
        self._read_count = 0
        """Number of samples that were read from the source."""
        self._next_index = 0
        """Number of results that were yielded, which is the index of the next one."""
        self._end: int | None = None
        """Total number of results; None while unknown."""
        self._broken: BaseException | None = None
        self._source_error: Exception | None = None
        self._feeding: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start reading the source."""
        self._feeding = asyncio.create_task(self._feed(), name="data set's samples")

    def close(self) -> None:
        """Stop reading the source."""
        if self._feeding is not None:
            self._feeding.cancel()

    @property
    def is_over(self) -> bool:
        """Whether no sample has to run any more."""
        return self._broken is not None or (self._end is not None and self._next_index + len(self._done) >= self._end)

    async def take(self, leave: Callable[[], bool] = lambda: False) -> Sample | None:
        """Return the free sample with the lowest index; None when all are settled, or when `leave` returns True.

        Args:
            leave: called after every change.
        """
        async with self._changed:
            while not (self.is_over or leave()):
                if self._ready:
                    _, sample = heapq.heappop(self._ready)
                    self._changed.notify_all()
                    return sample
                await self._changed.wait()
            return None

    async def give_back(self, *samples: Sample) -> None:
        """Return samples that were taken, so that they run elsewhere or later."""
        async with self._changed:
            for sample in samples:
                if self._end is None or sample.index < self._end:
                    heapq.heappush(self._ready, (sample.index, sample))
            self._changed.notify_all()

    async def settle(self, result: Result) -> None:
        """Record the result of a sample that was taken."""
        async with self._changed:
            if self._end is None or result.index < self._end:
                self._done[result.index] = result
            if result.failed and not self._keep_going:
                self._stop_after(result.index)
            self._changed.notify_all()

    async def wake(self) -> None:
        """Wake the callers of `take`, so that they call `leave`."""
        async with self._changed:
            self._changed.notify_all()

    async def abort(self, error: BaseException) -> None:
        """Stop because no device is left to run samples: `results` raises the error after the finished samples."""
        async with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    async def results(self) -> AsyncGenerator[Result, None]:
        """Yield the results of the samples in order; a failed sample is the last one unless `keep_going` is set.

        Raises:
            BaseException: the error of the source or of `abort`, after the results before it.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._next_index in self._done or self._next_index == self._end or self._broken
                )
                result = self._done.pop(self._next_index, None)
                if result is None:
                    if self._broken is not None and self._next_index != self._end:
                        raise self._broken
                    break
                self._next_index += 1
                self._changed.notify_all()
            yield result
        if self._source_error is not None and self._next_index == self._read_count:
            raise self._source_error

    def _stop_after(self, index: int) -> None:
        """Skip the samples after `index`."""
        self._end = min(self._end, index + 1) if self._end is not None else index + 1
        self._ready = [(place, sample) for place, sample in self._ready if place < self._end]
        heapq.heapify(self._ready)
        self._done = {place: result for place, result in self._done.items() if place < self._end}

    def _has_room(self) -> bool:
        return len(self._ready) < self._ready_limit and self._read_count < self._next_index + self._window

    async def _feed(self) -> None:
        try:
            while self._end is None:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._has_room() or self._end is not None)
                if self._end is not None:
                    return
                sample = await asyncio.to_thread(_next, self._source)
                async with self._changed:
                    if sample is None:
                        self._end = min(self._end, self._read_count) if self._end is not None else self._read_count
                    else:
                        self._read_count += 1
                        if self._end is None or sample.index < self._end:
                            heapq.heappush(self._ready, (sample.index, sample))
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - the source is the caller's: what it raises is raised where results are asked
            async with self._changed:
                self._source_error = error
                self._end = self._read_count if self._end is None else self._end
                self._changed.notify_all()


def _next(source: Iterator[Sample]) -> Sample | None:
    return next(source, None)
