"""Gates, which a device passes before a measurement so that it starts cool and idle. Bounded; skipped when unnecessary.

A device without thermal zones or a readable load passes at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from etfarm.device_agents.device import readings
from etfarm.v1 import report_pb2
from etfarm.wire.options import option

log = logging.getLogger(__name__)


MEASUREMENTS: Final = (
    "measurements",
    "What a measurement waits for, and what is set for it. It begins in any case when the wait is over, and the report tells "
    "what was missing. A machine without the sensor does not wait.",
)
"""Title and description of the options in the help."""


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number") from None
    # Refuse NaN and infinity.
    if not 0 <= value < 1e6:
        raise ArgumentTypeError(f"{text} is not between 0 and 1000000")
    return value


_limit = partial(option, read=_number, group=MEASUREMENTS)


@dataclass(frozen=True)
class GateLimits:
    """Thresholds of the gates, and limits on how long they are awaited."""

    # fmt: off
    # A Raspberry Pi slows down from 80 on, other boards and phones from about there; a start 20 below leaves room to warm up in
    # a run, and boards without a fan idle below 60. Phones need a lower limit: users wait for 37.
    cool_below_c: float = _limit(
        "--cool-below", "temperature of the hottest sensor, in degrees Celsius; default: %(default)g", default=60.0, metavar="C")
    # The wait also ends when it has no effect: see COOLING_WINDOW_S.
    cool_wait_s: float = _limit(
        "--cool-wait", "the longest wait for it, shorter if it does not get cooler; 0: none; default: %(default)g",
        default=60.0, metavar="S")
    # The sensors lag by about that.
    cool_down_s: float = _limit(
        "--cool-down", "least pause between two measurements on a machine with temperature sensors; default: %(default)g",
        default=1.0, metavar="S")
    # On two cpus one busy process is 0.5, and an idle system with this farm on it below 0.05. The load average is unsuitable: it
    # covers a minute, and so includes the preceding compilation.
    idle_below: float = _limit(
        "--idle-below", "tasks per cpu that run while nothing is measured yet; default: %(default)g", default=0.15, metavar="N")
    # A longer load is not brief housekeeping, and the verdict names it.
    idle_wait_s: float = _limit(
        "--idle-wait", "the longest wait for it; 0: none; default: %(default)g", default=10.0, metavar="S")
    # fmt: on


COOLING_WINDOW_S: Final = 10.0
COOLING_C: Final = 0.5
"""Minimum temperature drop within COOLING_WINDOW_S; a device that cools less is as cool as it gets here."""
LOOKS: Final = 5
LOOK_S: Final = 0.004
"""Seconds between two readings of the load. The mean of LOOKS readings spans 16 ms, which every measurement on an idle device
pays, and which is as long as the time slices of several busy tasks."""
_AGAIN_S: Final = 0.1
_COOL_AGAIN_S: Final = 0.5


@dataclass(frozen=True)
class Surroundings:
    """The readings that gates depend on; None if the device does not have them."""

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
"""Callback that takes the phase (WAIT_FOR_COOL, WAIT_FOR_IDLE) and a message with the awaited condition, whenever it changes."""


class Gates:
    """The gates of one device.

    Args:
        limits: the thresholds and the longest waits.
        around: the readings to use.
        last: a file whose modification time is the end of the last measurement; it outlives this process.
    """

    def __init__(self, limits: GateLimits, around: Surroundings, last: Path) -> None:
        self._limits = limits
        self._around = around
        self._last = last

    @property
    def longest_wait_s(self) -> float:
        """The longest that `wait` takes, in seconds."""
        return self._limits.cool_down_s + self._limits.cool_wait_s + self._limits.idle_wait_s

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
            on_wait: takes the awaited condition.
            left_s: the attempt's remaining time in seconds; waiting takes half of it at most, so that the program has the rest.
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
        # If the clock was set back, the pause must not become longer than configured.
        left_s = min(pause_s, self._last.stat().st_mtime + pause_s - around.wall_s())
        if left_s <= 0:
            return None
        on_wait("WAIT_FOR_COOL", f"a pause of {pause_s:g} s between two measurements")
        await around.sleep(left_s)
        return report_pb2.GateWait(gate=report_pb2.GATE_COOL_DOWN, waited_ms=left_s * 1e3, passed=True)

    async def _cool(self, on_wait: OnWait) -> report_pb2.GateWait | None:
        around, most = self._around, self._limits.cool_below_c
        began_s = around.now_s()
        history: deque[tuple[float, float]] = deque()
        while (hottest := await around.hottest_c()) is not None and hottest >= most:
            waited_s = around.now_s() - began_s
            history.append((waited_s, hottest))
            while waited_s - history[0][0] > COOLING_WINDOW_S:
                history.popleft()
            # An incomplete window does not show whether waiting helps.
            hopeless = waited_s >= COOLING_WINDOW_S and max(degrees for _, degrees in history) - hottest < COOLING_C
            if hopeless or waited_s >= self._limits.cool_wait_s:
                break
            limit = f"at most {self._limits.cool_wait_s:.3g} s"
            on_wait("WAIT_FOR_COOL", f"{limit}: {hottest:.1f} °C, to be below {most:g} °C")
            await around.sleep(min(_COOL_AGAIN_S, self._limits.cool_wait_s - waited_s))
        return self._gate_wait(report_pb2.GATE_COOL, began_s, hottest, most)

    async def _idle(self, on_wait: OnWait) -> report_pb2.GateWait | None:
        around, most = self._around, self._limits.idle_below
        began_s = around.now_s()
        while (busy := await self._busy()) is not None and busy >= most:
            waited_s = around.now_s() - began_s
            if waited_s >= self._limits.idle_wait_s:
                break
            limit = f"at most {self._limits.idle_wait_s:.3g} s"
            on_wait("WAIT_FOR_IDLE", f"{limit}: {busy:.2f} tasks per cpu run, to be below {most:g}")
            await around.sleep(min(_AGAIN_S, self._limits.idle_wait_s - waited_s))
        # Reading the load also takes time, which does not count as waiting.
        return self._gate_wait(report_pb2.GATE_IDLE, began_s + (LOOKS - 1) * LOOK_S, busy, most)

    async def _busy(self) -> float | None:
        counts: list[int] = []
        for index in range(LOOKS):
            if index:
                await self._around.sleep(LOOK_S)
            if (tasks := await self._around.runnable()) is None:
                return None
            counts.append(tasks)
        return sum(counts) / len(counts) / self._around.cpus

    def _gate_wait(
        self, gate: report_pb2.Gate.ValueType, began_s: float, last: float | None, most: float
    ) -> report_pb2.GateWait | None:
        waited_s = self._around.now_s() - began_s
        passed = last is None or last < most
        if passed and waited_s < _AGAIN_S:
            return None
        return report_pb2.GateWait(gate=gate, waited_ms=max(0.0, waited_s) * 1e3, passed=passed, measured=last, threshold=most)
