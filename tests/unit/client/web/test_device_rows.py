"""Devices with what runs on them, from a watch of devices and one of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import FarmError
from etfarm.client.models import CellState, Device, DeviceChange, JobInfo, JobState
from etfarm.client.transport.decode import decoded
from etfarm.client.web import device_rows
from etfarm.v1 import common_pb2, device_pb2, job_pb2

START = datetime(2026, 11, 23, 12, tzinfo=UTC)


class Watches:
    """A farm whose watches yield what a test puts there."""

    def __init__(self) -> None:
        self.devices: asyncio.Queue[Any] = asyncio.Queue()
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()

    async def watch_devices(self, selector: str = "") -> AsyncIterator[DeviceChange]:
        while True:
            change = await self.devices.get()
            if isinstance(change, Exception):
                raise change
            yield change

    async def watch_jobs(self) -> AsyncIterator[JobInfo]:
        while True:
            yield await self.jobs.get()


def device(name: str, **changes: Any) -> Device:
    return decoded(Device, device_pb2.Device(id=f"id-{name}", name=name, state=device_pb2.DEVICE_STATE_IDLE, **changes))


def job(job_id: str, *places: tuple[str, CellState]) -> JobInfo:
    """Return a job with a cell in this state on each of these devices."""
    message = job_pb2.Job(id=job_id, name=f"name-{job_id}", owner="ann", state=job_pb2.JOB_STATE_RUNNING)
    for index, (place, state) in enumerate(places):
        attempt = job_pb2.Attempt(id=f"{job_id}-{index}", device_id=place)
        attempt.start_time.FromDatetime(START)
        message.cells.add(
            id=f"{job_id}-{index}", index=index, candidate_name="resnet8", method="forward", attempts=[attempt],
            state=common_pb2.CellState.Value(f"CELL_STATE_{state.value}"),
        )  # fmt: skip
    info = decoded(JobInfo, message)
    assert info.state is JobState.RUNNING
    return info


async def test_a_run_appears_with_its_owner_and_start_and_ends() -> None:
    farm = Watches()
    rows = device_rows.watch(cast(AsyncFarm, farm))
    farm.devices.put_nowait(DeviceChange("id-a", device("a")))
    assert await anext(rows) == ("id-a", device_rows.DeviceRow(device("a")))
    farm.jobs.put_nowait(job("j", ("id-a", CellState.RUNNING), ("id-unknown", CellState.RUNNING), ("id-a", CellState.ANALYZING)))
    key, row = await anext(rows)
    assert key == "id-a" and row is not None
    assert row.runs == (device_rows.Run("j", "name-j", "ann", "resnet8", START),)
    farm.jobs.put_nowait(job("j", ("id-a", CellState.ANALYZING)))
    assert await anext(rows) == ("id-a", device_rows.DeviceRow(device("a")))
    await rows.aclose()  # type: ignore[attr-defined]


async def test_a_device_that_leaves_and_comes_back_has_its_run_again() -> None:
    farm = Watches()
    rows = device_rows.watch(cast(AsyncFarm, farm))
    farm.jobs.put_nowait(job("j", ("id-a", CellState.RUNNING)))
    farm.devices.put_nowait(DeviceChange("id-b", device("b")))
    assert (await anext(rows))[0] == "id-b"
    farm.devices.put_nowait(DeviceChange("id-a", device("a")))
    _, row = await anext(rows)
    assert row is not None and [run.job_id for run in row.runs] == ["j"]
    farm.devices.put_nowait(DeviceChange("id-a", None))
    assert await anext(rows) == ("id-a", None)
    farm.devices.put_nowait(FarmError("The farm is away."))
    with pytest.raises(FarmError):
        await anext(rows)


def test_a_heartbeat_changes_nothing_but_readings() -> None:
    first, second = device_rows.DeviceRow(device("a")), device_rows.DeviceRow(device("a", arch="aarch64"))
    telemetry = device_pb2.DeviceTelemetry(temperature_c=50.0)
    assert device_rows.is_only_telemetry(first, device_rows.DeviceRow(device("a", telemetry=telemetry)))
    assert not device_rows.is_only_telemetry(first, second)
