"""The sampler: records the device's state during a timed pass, from a thread of the agent.

The runner is a separate process, so the thread shares only the machine with it. If the runner is bound to some cpus and there are
others, the thread keeps to the others. Cost, measured on a virtual machine with two cpus and without sensors: 0.07 ms of CPU time
per point with warm caches and 0.4 ms when woken on a busy machine, thus at most 0.2 % of one cpu at five points a second; a file
under /sys costs 10 to 20 us more, and a sensor behind a slow bus waits instead of computing. `Sampled.cpu_ns` is the cost of each
pass.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from etfarm.device_agents.device import readings
from etfarm.v1 import report_pb2

MAX_POINTS: Final = 120
"""Maximum number of points, enough for a curve. In a longer pass every second point is dropped, repeatedly if necessary, and
the interval doubles."""
FIRST_INTERVAL_S: Final = 0.2
"""The first interval: five points in the shortest usual pass, one second."""
LONGEST_READING_S: Final = 5.0
"""Longest time for a reading. Sensors behind a slow bus answer within 0.1 s; if one does not, all samples are dropped."""
_CPUS_READ: Final = 4
"""Number of cpus per cluster whose clock is read: on phones and boards all of them share it, and a PC may have a hundred."""


@dataclass(frozen=True)
class Sampled:
    """The samples of one pass."""

    before: report_pb2.SystemReading
    after: report_pb2.SystemReading
    series: list[report_pb2.TelemetryPoint]
    cpu_ns: int
    """CPU time of the sampling thread."""


class Watch(Protocol):
    """An observer of the device during one pass."""

    def begin(self) -> None:
        """Begin the pass; return at once."""

    async def seen(self) -> Sampled | None:
        """End the pass and return the samples; None if there are none."""


@dataclass
class _Points:
    """The time series, at most MAX_POINTS long, and its interval."""

    interval_s: float
    taken: list[report_pb2.TelemetryPoint] = field(default_factory=list)

    def add(self, point: report_pb2.TelemetryPoint) -> None:
        self.taken.append(point)
        if len(self.taken) >= MAX_POINTS:
            # Shares refer to the preceding point; those of dropped points are lost, and the remaining ones are still valid
            # samples.
            self.taken = self.taken[1::2]
            self.interval_s *= 2


class Sampler:
    """A sampler of one pass: `with Sampler(...) as sampler: sampler.begin(); ...; sampled = sampler.end()`.

    Args:
        clusters: logical cpus of each kind, in the order of the device's clusters.
        busy: cpus that the runner is bound to; None if it may run on all.
        interval_s: seconds between two points at first.
        root: the folder that contains /proc and /sys.
    """

    def __init__(
        self,
        clusters: Sequence[Sequence[int]],
        busy: Collection[int] | None = None,
        *,
        interval_s: float = FIRST_INTERVAL_S,
        root: Path = Path("/"),
    ) -> None:
        self._busy = frozenset(busy or ())
        self._clusters = [list(cpus)[:_CPUS_READ] for cpus in clusters]
        self._root = root
        self._paths = readings.find(root)
        lean = {readings.STAT, readings.LOAD, readings.CPU_PRESSURE}
        clocks = {f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq" for cpus in self._clusters for cpu in cpus}
        self._lean = [path for path in self._paths if path in lean | clocks or path.endswith("/temp")]
        self._points = _Points(interval_s)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)
        self._sampled: Sampled | None = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()

    @property
    def begun(self) -> bool:
        """Whether sampling has begun."""
        return self._thread.ident is not None

    def begin(self) -> None:
        """Begin the pass; return at once."""
        self._thread.start()

    def end(self, wait_s: float = LONGEST_READING_S) -> Sampled | None:
        """End the pass; return the samples within milliseconds, or None if there are none or a sensor hangs."""
        if not self.begun:
            return None
        self._stop.set()
        self._thread.join(wait_s)
        return self._sampled

    async def seen(self) -> Sampled | None:
        """End the pass; see `Watch.seen`."""
        return await asyncio.to_thread(self.end)

    def _watch(self) -> None:
        _keep_off(self._busy)
        began_s = time.monotonic()

        def elapsed_ms() -> float:
            return (time.monotonic() - began_s) * 1e3

        facts = readings.collect(self._paths, self._root)
        before = readings.parse(facts, elapsed_ms())
        last, last_ms = facts, before.elapsed_ms
        while not self._stop.wait(self._points.interval_s):
            facts, now_ms = readings.collect(self._lean, self._root), elapsed_ms()
            self._points.add(point(facts, last, now_ms, last_ms, self._clusters))
            last, last_ms = facts, now_ms
        after = readings.parse(readings.collect(self._paths, self._root), elapsed_ms())
        self._sampled = Sampled(before, after, self._points.taken, time.thread_time_ns())


@asynccontextmanager
async def watched(make: Callable[[], Sampler]) -> AsyncIterator[Sampler]:
    """Provide a sampler as a `Watch`. It is created in a thread, since finding the machine's sensors takes milliseconds."""
    with await asyncio.to_thread(make) as sampler:
        yield sampler


def point(
    facts: readings.Facts, earlier: readings.Facts, at_ms: float, earlier_ms: float, clusters: Sequence[Sequence[int]]
) -> report_pb2.TelemetryPoint:
    """Return a point of the series, from the facts of this point and of the preceding one. No I/O."""
    sample = report_pb2.TelemetryPoint(elapsed_ms=at_ms)
    fastest = [
        max((hz for cpu in cpus if (hz := readings.frequency_hz(facts, cpu)) is not None), default=None) for cpus in clusters
    ]
    frequencies = [hz for hz in fastest if hz is not None]
    if len(frequencies) == len(fastest):
        sample.frequency_hz.extend(frequencies)
    if (temperature := readings.hottest_c(facts)) is not None:
        sample.temperature_c = temperature
    if (load := readings.parse({readings.LOAD: facts.get(readings.LOAD, "")})).HasField("load_1m"):
        sample.load_1m = load.load_1m
    between_ms = at_ms - earlier_ms
    if between_ms <= 0:
        return sample
    waited = [readings.waited_us(each.get(readings.CPU_PRESSURE, "")) for each in (earlier, facts)]
    if waited[0] is not None and waited[1] is not None:
        sample.psi_cpu = max(0, waited[1] - waited[0]) / 1e3 / between_ms
    times = [readings.cpu_times_ns(each.get(readings.STAT, "")) for each in (earlier, facts)]
    if times[0] is not None and times[1] is not None:
        sample.busy_cpus = max(0, times[1][0] - times[0][0]) / 1e6 / between_ms
    return sample


def _keep_off(busy: frozenset[int]) -> None:
    """Bind the calling thread to the other cpus, if there are any and the system permits it."""
    try:
        if busy and (others := os.sched_getaffinity(0) - busy):
            os.sched_setaffinity(0, others)
    except OSError:
        return
