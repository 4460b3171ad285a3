"""Devices with what runs on them: a watch of the devices and one of the live jobs, joined."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError
from etfarm.client.models import CellState, Device, DeviceChange, DeviceState, JobInfo

MAX_WAITING: Final = 64
"""Number of changes that are taken from the farm in advance; it gathers the rest."""


@dataclass(frozen=True)
class Run:
    """A cell that runs on a device."""

    job_id: str
    job_name: str
    owner: str
    label: str
    """What is measured, as `Cell.label`."""
    started_at: datetime | None


@dataclass(frozen=True)
class DeviceRow:
    """A device, and the runs of the visitor's projects on it."""

    device: Device
    runs: tuple[Run, ...] = ()

    @property
    def id(self) -> str:
        """The device's id."""
        return self.device.id

    @property
    def state(self) -> str:
        """The device's state."""
        return self.device.state.value


def is_only_telemetry(before: DeviceRow, after: DeviceRow) -> bool:
    """Return whether nothing but the readings of a heartbeat differs."""
    return before.runs == after.runs and _without_readings(before.device) == _without_readings(after.device)


def count_states(rows: Iterable[DeviceRow]) -> Counter[str]:
    """Return the number of devices in each state, and of the idle ones that are reserved as RESERVED.

    The list's summary has them, which changes as often as any device: a template would take ten times as long.
    """
    counts = Counter([row.device.state.value for row in rows])
    counts["RESERVED"] = sum(row.device.reservation is not None and row.device.state is DeviceState.IDLE for row in rows)
    return counts


def _without_readings(device: Device) -> Device:
    return replace(device, telemetry={}, last_seen_at=None)


async def load(client: AsyncFarm, device_id: str = "") -> Mapping[str, DeviceRow]:
    """Return all devices, or one, by id. What runs on them follows with `watch`."""
    devices = [await client.device(device_id)] if device_id else await client.devices()
    return {device.id: DeviceRow(device) for device in sorted(devices, key=lambda device: (device.name, device.id))}


async def watch(client: AsyncFarm, device_id: str = "") -> AsyncIterator[tuple[str, DeviceRow | None]]:
    """Yield each device that has changed, or on which a run has begun or ended.

    Raises:
        EtfarmError: as `AsyncFarm.watch_devices` and `AsyncFarm.watch_jobs`.
    """
    changes: asyncio.Queue[DeviceChange | JobInfo | EtfarmError] = asyncio.Queue(MAX_WAITING)

    async def forward(source: AsyncIterator[DeviceChange] | AsyncIterator[JobInfo]) -> None:
        try:
            async for change in source:
                await changes.put(change)
        except EtfarmError as error:
            await changes.put(error)

    sources = (client.watch_devices(f"id={device_id}" if device_id else ""), client.watch_jobs())
    tasks = [asyncio.create_task(forward(source), name="devices and jobs") for source in sources]
    joined = _Joined()
    try:
        while True:
            change = await changes.get()
            if isinstance(change, EtfarmError):
                raise change
            for key in joined.take_job(change) if isinstance(change, JobInfo) else joined.take_device(change):
                yield key, joined.row(key)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Joined:
    """The devices that are known, and the runs of live jobs on them."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}
        self._runs: dict[str, dict[str, Run]] = {}
        """By device, then by cell."""
        self._cells: dict[str, dict[str, str]] = {}
        """The device of each running cell, by job and cell."""

    def take_device(self, change: DeviceChange) -> Iterable[str]:
        """Take a change, and return the ids of the devices whose rows differ."""
        if change.device is None:
            self._devices.pop(change.device_id, None)
        else:
            self._devices[change.device_id] = change.device
        return (change.device_id,)

    def take_job(self, job: JobInfo) -> Iterable[str]:
        """Take a job as it is now, and return the ids of known devices on which its runs began or ended."""
        before = self._cells.pop(job.id, {})
        for cell_id, device_id in before.items():
            self._runs[device_id].pop(cell_id, None)
            if not self._runs[device_id]:
                del self._runs[device_id]
        running = {cell.id: cell for cell in job.cells if cell.state is CellState.RUNNING and cell.device is not None}
        for cell in running.values():
            run = Run(job.id, job.name, job.owner, cell.label, cell.started_at)
            self._runs.setdefault(cell.device or "", {})[cell.id] = run
        if running:
            self._cells[job.id] = {cell.id: cell.device or "" for cell in running.values()}
        touched = {*before.values(), *(cell.device or "" for cell in running.values())}
        return [device_id for device_id in touched if device_id in self._devices]

    def row(self, device_id: str) -> DeviceRow | None:
        """Return a device's row; None if the device is gone."""
        device = self._devices.get(device_id)
        return None if device is None else DeviceRow(device, tuple(self._runs.get(device_id, {}).values()))
