"""Watches of all devices and of all jobs, which continue after a broken stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from etfarm.client.errors import EtfarmError
from etfarm.client.models import Cell, Device, DeviceChange, JobInfo
from etfarm.client.transport import decode
from etfarm.client.transport.decode import decoded
from etfarm.v1 import device_pb2, job_pb2

if TYPE_CHECKING:
    from etfarm.client.transport.stubs import Stubs


async def watch_devices(stubs: Stubs, selector: str, *, telemetry: bool) -> AsyncIterator[DeviceChange]:
    """Yield the devices that match, and then each change; see `AsyncFarm.watch_devices`."""
    request = device_pb2.WatchDevicesRequest(selector=selector, telemetry=telemetry)
    known: dict[str, Device] = {}
    stubs = stubs.lasting()
    backoff = stubs.patience.backoff()
    while True:
        in_snapshot: set[str] | None = set()
        try:
            async for event in stubs.devices.Watch(request):
                backoff.reset()
                if event.snapshot_complete:
                    for device_id in known.keys() - (in_snapshot or set()):
                        del known[device_id]
                        yield DeviceChange(device_id, None)
                    in_snapshot = None
                elif event.removed_device_id:
                    if known.pop(event.removed_device_id, None) is not None:
                        yield DeviceChange(event.removed_device_id, None)
                elif event.HasField("device"):
                    device = decoded(Device, event.device)
                    if in_snapshot is not None:
                        in_snapshot.add(device.id)
                    if known.get(device.id) != device:
                        known[device.id] = device
                        yield DeviceChange(device.id, device)
        except grpc.aio.AioRpcError as error:
            await backoff.after(error)
        else:
            if not await backoff.wait():
                return


class _Known:
    """A live job with what was received of it."""

    def __init__(self, info: JobInfo, versions: dict[int, int]) -> None:
        self.info = info
        self.cells: dict[int, Cell] = {cell.index: cell for cell in info.cells}
        self.versions = versions
        """Versions of the cells, by index."""

    def take(self, message: job_pb2.Cell, state: job_pb2.JobState.ValueType) -> bool:
        """Update a cell; return whether it was outdated."""
        if message.version <= self.versions.get(message.index, 0):
            return False
        self.versions[message.index] = message.version
        self.cells[message.index] = decoded(Cell, message)
        cells = tuple(self.cells[index] for index in sorted(self.cells))
        self.info = replace(self.info, cells=cells, state=decode.job_state(state))
        return True

    def take_phase(self, progress: job_pb2.Progress) -> bool:
        """Update what a cell does; return whether that is new."""
        for cell in self.cells.values():
            if cell.id == progress.cell_id and not cell.state.is_terminal and cell.phase != progress.phase:
                self.cells[cell.index] = replace(cell, phase=progress.phase)
                self.info = replace(self.info, cells=tuple(self.cells[index] for index in sorted(self.cells)))
                return True
        return False


async def watch_jobs(stubs: Stubs, owner: str) -> AsyncIterator[JobInfo]:
    """Yield the live jobs, and then each job that has changed; see `AsyncFarm.watch_jobs`."""
    request = job_pb2.WatchAllJobsRequest(owner=owner)
    live: dict[str, _Known] = {}
    stubs = stubs.lasting()
    backoff = stubs.patience.backoff()
    while True:
        in_snapshot: set[str] = set()
        try:
            async for change in stubs.jobs.WatchAll(request):
                backoff.reset()
                if change.snapshot_begins:
                    in_snapshot = set()
                elif change.snapshot_complete:
                    for job_id in live.keys() - in_snapshot:
                        if (info := await _ended(stubs, live.pop(job_id).info)) is not None:
                            yield info
                elif change.HasField("cell"):
                    known = live.get(change.job_id)
                    if known is not None and known.take(change.cell, change.job_state):
                        yield known.info
                elif change.HasField("progress"):
                    known = live.get(change.job_id)
                    if known is not None and known.take_phase(change.progress):
                        yield known.info
                elif change.HasField("job"):
                    in_snapshot.add(change.job_id)
                    if (info := _job(live, change)) is not None:
                        yield info
        except grpc.aio.AioRpcError as error:
            await backoff.after(error)
        else:
            if not await backoff.wait():
                return


def _job(live: dict[str, _Known], change: job_pb2.JobChange) -> JobInfo | None:
    """Return a job that was submitted, changed or ended; None if it is as before."""
    info = decoded(JobInfo, change.job)
    former = live.get(info.id)
    if info.state.is_terminal:
        live.pop(info.id, None)
        return replace(info, cells=former.info.cells if former is not None and not info.cells else info.cells)
    live[info.id] = _Known(info, {cell.index: cell.version for cell in change.job.cells})
    return info if former is None or former.info != info else None


async def _ended(stubs: Stubs, last: JobInfo) -> JobInfo | None:
    """Return how a job ended that is no longer live; None if it is not stored any more."""
    try:
        return decoded(JobInfo, await stubs.jobs.Get(job_pb2.GetJobRequest(job_id=last.id)))
    except EtfarmError as error:
        if error.reason != "JOB_NOT_FOUND":
            raise
        return None
