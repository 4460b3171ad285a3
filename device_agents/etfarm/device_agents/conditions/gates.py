"""Gates: what a device waits for before a measurement, so that it starts cool and idle. Bounded; skipped when unnecessary.

A device without thermal zones or a readable load passes at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from etfarm.device_agents.device import readings
from etfarm.v1 import report_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GateLimits:
    """Limits of what a measurement waits for, and how long."""

    cool_below_c: float = 60.0
    """Temperature of the hottest zone. A Raspberry Pi slows down from 80 on, other boards and phones from about there; what
    starts 20 below has room to warm up in a run, and boards without a fan are below 60 when they idle. Phones want less:
    their users wait for 37."""
    cool_wait_s: float = 60.0
    """The longest wait for it, which also ends where waiting does not help: see COOLING_WINDOW_S."""
    cool_down_s: float = 1.0
    """Least pause between two measurements of a device that has thermal zones, whose sensors lag behind by about that."""
    idle_below: float = 0.15
    """Tasks that run or want to, per cpu, before the runner starts. On two cpus one busy process is 0.5, and an idle system with
    this farm on it below 0.05. The load average is of no use here: it remembers a minute, thus the compilation just before."""
    idle_wait_s: float = 10.0
    """The longest wait for it. What takes longer is no moment of housekeeping, and the verdict names it."""


COOLING_WINDOW_S: Final = 10.0
COOLING_C: Final = 0.5
"""A device that has not lost so much within COOLING_WINDOW_S is as cool as it gets here."""
LOOKS: Final = 5
LOOK_S: Final = 0.004
"""Whether it is idle is the mean of LOOKS looks, so far apart: 16 ms that every measurement on an idle device pays, and as long
as the time slices of several busy tasks."""
_AGAIN_S: Final = 0.1
_COOL_AGAIN_S: Final = 0.5


@dataclass(frozen=True)
class Surroundings:
    """The readings that gates depend on; None is what a device does not have."""

    hottest_c: Callable[[], Awaitable[float | None]]
    runnable: Callable[[], Awaitable[int | None]]
    cpus: int
    now_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    @classmethod
    def of_machine(cls, root: Path = Path("/")) -> Surroundings:
        """Return this machine's surroundings."""
        heat = [path for path in readings.find(root) if "/thermal_zone" in path]

        async def hottest_c() -> float | None:
            return readings.hottest_c(readings.collect(heat, root))

        async def runnable() -> int | None:
            return readings.runnable(readings.collect([readings.LOAD], root).get(readings.LOAD, ""))

        return cls(hottest_c, runnable, os.cpu_count() or 1)


OnWait = Callable[[str, str], None]
"""Takes the phase (WAIT_FOR_COOL, WAIT_FOR_IDLE) and a message that says what is waited for, whenever that changes."""


class Gates:
    """The gates of one device.

    Args:
        limits: what to wait for.
        around: what to look at.
        last: a file whose time is when the last measurement ended; it outlives this process.
    """

    def __init__(self, limits: GateLimits, around: Surroundings, last: Path) -> None:
        self._limits = limits
        self._around = around
        self._last = last

    def measured(self) -> None:
        """Note that a measurement ended now."""
        now_s = self._around.wall_s()
        try:
            self._last.touch()
            os.utime(self._last, (now_s, now_s))
        except OSError as error:
            log.warning("%s cannot be written: %s", self._last, error)

    async def wait(self, on_wait: OnWait, left_s: float) -> list[report_pb2.GateWait]:
        """Wait until the device is cool and idle, or the limits are reached; return the gates that had to wait.

        Args:
            on_wait: takes what is waited for.
            left_s: what is left of the attempt's time; waiting takes half of it at most, so that the program has the rest.
        """
        limits, each_s = self._limits, left_s / 6
        limits = replace(
            limits,
            cool_down_s=min(limits.cool_down_s, each_s),
            cool_wait_s=min(limits.cool_wait_s, each_s),
            idle_wait_s=min(limits.idle_wait_s, each_s),
        )
        bounded = Gates(limits, self._around, self._last)
        waits = [await bounded._cool_down(on_wait), await bounded._cool(on_wait), await bounded._idle(on_wait)]
        return [each for each in waits if each is not None]

    async def _cool_down(self, on_wait: OnWait) -> report_pb2.GateWait | None:
        around, pause_s = self._around, self._limits.cool_down_s
        if not self._last.exists() or await around.hottest_c() is None:
            return None
        # A clock that was set back must not make the pause longer than it is.
        left_s = min(pause_s, self._last.stat().st_mtime + pause_s - around.wall_s())
        if left_s <= 0:
            return None
        on_wait("WAIT_FOR_COOL", f"a pause of {pause_s:g} s between two measurements")
        await around.sleep(left_s)
        return report_pb2.GateWait(gate="COOL_DOWN", waited_ms=left_s * 1e3, passed=True)

    async def _cool(self, on_wait: OnWait) -> report_pb2.GateWait | None:
        around, most = self._around, self._limits.cool_below_c
        began_s = around.now_s()
        seen: deque[tuple[float, float]] = deque()
        while (hottest := await around.hottest_c()) is not None and hottest >= most:
            waited_s = around.now_s() - began_s
            seen.append((waited_s, hottest))
            while waited_s - seen[0][0] > COOLING_WINDOW_S:
                seen.popleft()
            # A window that is not full yet says nothing about whether waiting helps.
            hopeless = waited_s >= COOLING_WINDOW_S and max(degrees for _, degrees in seen) - hottest < COOLING_C
            if hopeless or waited_s >= self._limits.cool_wait_s:
                break
            on_wait("WAIT_FOR_COOL", f"{hottest:.1f} °C, to be below {most:g} °C")
            await around.sleep(min(_COOL_AGAIN_S, self._limits.cool_wait_s - waited_s))
        return self._gate_wait("COOL", began_s, hottest, most)

    async def _idle(self, on_wait: OnWait) -> report_pb2.GateWait | None:
        around, most = self._around, self._limits.idle_below
        began_s = around.now_s()
        while (busy := await self._busy()) is not None and busy >= most:
            waited_s = around.now_s() - began_s
            if waited_s >= self._limits.idle_wait_s:
                break
            on_wait("WAIT_FOR_IDLE", f"{busy:.2f} tasks per cpu run, to be below {most:g}")
            await around.sleep(min(_AGAIN_S, self._limits.idle_wait_s - waited_s))
        # Reading the load takes time as well, which is no waiting.
        return self._gate_wait("IDLE", began_s + (LOOKS - 1) * LOOK_S, busy, most)

    async def _busy(self) -> float | None:
        looks: list[int] = []
        for index in range(LOOKS):
            if index:
                await self._around.sleep(LOOK_S)
            if (seen := await self._around.runnable()) is None:
                return None
            looks.append(seen)
        return statistics.fmean(looks) / self._around.cpus

    def _gate_wait(self, gate: str, began_s: float, last: float | None, most: float) -> report_pb2.GateWait | None:
        waited_s = self._around.now_s() - began_s
        passed = last is None or last < most
        if passed and waited_s < _AGAIN_S:
            return None
        return report_pb2.GateWait(gate=gate, waited_ms=max(0.0, waited_s) * 1e3, passed=passed, measured=last, threshold=most)
