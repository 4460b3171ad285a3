"""Placement of waiting cells on idle devices, whenever either changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from etfarm.server.devices import schedule
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Progressed, Runs
from etfarm.server.devices.schedule import Waiting
from etfarm.v1.device_pb2 import Device

_MANY: Final = 100
"""Number of cells and devices from which on placements are spaced."""

_PAUSE: Final = 9
"""Pause between two placements, as a multiple of the duration of the first. When 1,000 cells are cancelled, each frees its
device; the others need not be considered anew each time."""


@dataclass
class _Request:
    """A cell in the queue, with its callbacks."""

    waiting: Waiting
    attempt_id: str
    on_progress: Progressed
    on_wait: Callable[[str], None]
    chosen: asyncio.Future[str]
    why: str = ""


class Placement:
    """The queue of cells that wait for a device."""

    def __init__(self, registry: Registry, runs: Runs) -> None:
        self._registry = registry
        self._runs = runs
        self._requests: dict[str, _Request] = {}
        self._size = 0
        """Number of cells and devices at the last placement."""
        self._next_s = 0.0
        self._due: asyncio.TimerHandle | None = None
        registry.on_change(self.place)

    async def device(self, waiting: Waiting, attempt_id: str, on_progress: Progressed, on_wait: Callable[[str], None]) -> Device:
        """Wait until a device is free for the cell, occupy it with the attempt, and return it.

        Args:
            on_wait: called with the reason for waiting whenever that changes; empty if the cell only waits for its turn.
        """
        chosen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests[waiting.cell_id] = _Request(waiting, attempt_id, on_progress, on_wait, chosen)
        try:
            self.place()
            return self._registry.get(await chosen)
        except asyncio.CancelledError:
            self.free(attempt_id)
            raise
        finally:
            self._requests.pop(waiting.cell_id, None)

    def free(self, attempt_id: str) -> None:
        """Free the attempt's device for the next cell. Has no effect for an attempt without a device."""
        self._runs.end(attempt_id)
        self.place()

    def place(self) -> None:
        """Assign all cells that can be assigned, or schedule that for soon if a large placement has just run."""
        if self._due is not None:
            return
        loop = asyncio.get_running_loop()
        if max(self._size, len(self._requests)) < _MANY or loop.time() >= self._next_s:
            self._place()
        else:
            self._due = loop.call_at(self._next_s, self._place)

    def _place(self) -> None:
        self._due = None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._assign()
        ended_s = loop.time()
        self._next_s = ended_s + _PAUSE * (ended_s - began_s)

    def _assign(self) -> None:
        """Assign all cells that can be assigned now."""
        requests = {cell_id: request for cell_id, request in self._requests.items() if not request.chosen.done()}
        if not requests:
            return
        devices = self._registry.devices()
        self._size = len(requests) + len(devices)
        for assignment in schedule.schedule([request.waiting for request in requests.values()], devices):
            request = requests.pop(assignment.cell_id)
            self._runs.begin(request.attempt_id, assignment.device_id, request.on_progress, project=request.waiting.project)
            request.chosen.set_result(assignment.device_id)
        busy = self._runs.busy()
        fitting = schedule.Fitting(devices)
        reasons: dict[object, str] = {}
        for request in requests.values():
            key = request.waiting.kind
            if key not in reasons:
                reasons[key] = schedule.why_waiting(request.waiting, fitting, busy)
            why = reasons[key]
            if why != request.why:
                request.why = why
                request.on_wait(why)
