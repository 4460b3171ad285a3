"""Watches of devices: a snapshot, and then the latest state of each device that has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.v1.device_pb2 import Device, DeviceEvent
from etfarm.wire.selectors import Selector

_SLICE: Final = 100
"""Number of devices that are described before other calls continue."""

_PAUSE: Final = 9
"""Pause between two comparisons of all devices, as a multiple of the duration of the first."""

_MAX_VIEWS: Final = 2_000
"""Maximum number of descriptions that watchers share."""

_VOLATILE: Final = ("telemetry", "last_seen_time")
"""Fields that change with each heartbeat."""


class View(NamedTuple):
    """A device as a caller sees it."""

    event: DeviceEvent
    """The device in the message that all watchers share."""
    state: int
    """A hash of all fields but those that change with each heartbeat."""
    whole: int
    """A hash of all fields."""


class Watcher:
    """The ids of the devices that have changed since a watcher took them: its memory is bounded by the number of devices.

    Args:
        telemetry: whether a change of only the telemetry counts.
    """

    def __init__(self, telemetry: bool) -> None:
        self.telemetry = telemetry
        self._changed: dict[str, None] = {}
        self._something = asyncio.Event()

    def mark(self, device_ids: Iterable[str]) -> None:
        """Note that devices may have changed."""
        self._changed |= dict.fromkeys(device_ids)
        self._something.set()

    async def take(self) -> list[str]:
        """Wait for changes, and return the devices' ids, each once."""
        await self._something.wait()
        self._something.clear()
        taken = list(self._changed)
        self._changed.clear()
        return taken


class DeviceWatch:
    """The watchers of the farm's devices. A watcher that reads slowly gets the latest state of a device, and not each one."""

    def __init__(self, registry: Registry, runs: Runs) -> None:
        self._registry = registry
        self._watchers: set[Watcher] = set()
        self._views: dict[frozenset[str] | None, dict[str, View]] = {}
        """Current descriptions, by the projects of a scope and device id, for all watchers with the same scope."""
        self._hashes: dict[str, int] = {}
        """Hashes of all devices at the last comparison."""
        self._comparing: asyncio.Task[None] | None = None
        self._is_due = False
        registry.follow(self._mark)
        registry.on_telemetry(self._mark_telemetry)
        runs.on_change(self._mark)

    async def events(self, selector: Selector, scope: Scope, *, telemetry: bool) -> AsyncGenerator[DeviceEvent]:
        """Yield the devices of a scope that match, and then the changes until the caller leaves.

        Args:
            telemetry: whether to yield a device also when only its telemetry has changed.
        """
        watcher = Watcher(telemetry)
        self._watchers.add(watcher)
        sent: dict[str, int] = {}
        try:
            for number, device_id in enumerate(self._registry.ids()):
                if number % _SLICE == _SLICE - 1:
                    await asyncio.sleep(0)
                if (event := self._event(device_id, selector, scope, sent, telemetry=telemetry)) is not None:
                    yield event
            yield DeviceEvent(snapshot_complete=True)
            while True:
                for number, device_id in enumerate(await watcher.take()):
                    if number % _SLICE == _SLICE - 1:
                        await asyncio.sleep(0)
                    if (event := self._event(device_id, selector, scope, sent, telemetry=telemetry)) is not None:
                        yield event
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._views.clear()
                self._hashes.clear()

    def _event(
        self, device_id: str, selector: Selector, scope: Scope, sent: dict[str, int], *, telemetry: bool
    ) -> DeviceEvent | None:
        """Return the event that a watcher needs for a device; None if it has the current state.

        Args:
            sent: hashes of the devices that the watcher has, by id; updated.
        """
        view = self._view(device_id, scope)
        if view is None or not selector.matches(view.event.device):
            return None if sent.pop(device_id, None) is None else DeviceEvent(removed_device_id=device_id)
        current = view.whole if telemetry else view.state
        if sent.get(device_id) == current:
            return None
        sent[device_id] = current
        return view.event

    def _view(self, device_id: str, scope: Scope) -> View | None:
        views = self._views.get(scope.projects, {})
        if (known := views.get(device_id)) is not None:
            return known
        device = self._registry.find(device_id, scope)
        if device is None:
            return None
        view = view_of(self._registry.describe(device))
        if sum(map(len, self._views.values())) >= _MAX_VIEWS:
            self._views.clear()
        self._views.setdefault(scope.projects, {})[device_id] = view
        return view

    def _mark(self, device_ids: Collection[str]) -> None:
        if not self._watchers:
            return
        if not device_ids:
            self._views.clear()
            self._compare_soon()
            return
        self._discard_views(device_ids)
        for watcher in self._watchers:
            watcher.mark(device_ids)

    def _mark_telemetry(self, readings: Mapping[str, object]) -> None:
        if not self._watchers:
            return
        self._discard_views(readings)
        for watcher in self._watchers:
            if watcher.telemetry:
                watcher.mark(readings)

    def _discard_views(self, device_ids: Iterable[str]) -> None:
        for device_id in device_ids:
            for views in self._views.values():
                views.pop(device_id, None)

    def _compare_soon(self) -> None:
        """Find the devices that have changed, where these are unknown, without delaying other calls."""
        self._is_due = True
        if self._comparing is None or self._comparing.done():
            self._comparing = asyncio.create_task(self._compare(), name="changes of devices")

    async def _compare(self) -> None:
        loop = asyncio.get_running_loop()
        while self._is_due and self._watchers:
            self._is_due = False
            began_s = loop.time()
            ids = self._registry.ids()
            for start in range(0, len(ids), _SLICE):
                changed = [device_id for device_id in ids[start : start + _SLICE] if self._has_changed(device_id)]
                for watcher in self._watchers if changed else ():
                    watcher.mark(changed)
                await asyncio.sleep(0)
            await asyncio.sleep(_PAUSE * (loop.time() - began_s))

    def _has_changed(self, device_id: str) -> bool:
        view = self._view(device_id, EVERYTHING)
        if view is None:
            return self._hashes.pop(device_id, None) is not None
        before, self._hashes[device_id] = self._hashes.get(device_id), view.state
        return before != view.state


def view_of(device: Device) -> View:
    """Return a device with its hashes."""
    stable = Device()
    stable.CopyFrom(device)
    for name in _VOLATILE:
        stable.ClearField(name)
    state = hash(stable.SerializeToString(deterministic=True))
    volatile = device.telemetry.SerializeToString(deterministic=True), device.last_seen_time.ToNanoseconds()
    return View(DeviceEvent(device=device), state, hash((state, volatile)))
