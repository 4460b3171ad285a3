"""Reservations and watches of the client, against a server that a test holds in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from etfarm.client.errors import EtfarmError
from etfarm.client.fleet import watches
from etfarm.client.fleet.reservation import AsyncReservation
from etfarm.client.jobs import summary
from etfarm.client.models import CellState, DeviceChange, JobInfo, JobState
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import device_pb2, device_pb2_grpc, job_pb2, job_pb2_grpc
from etfarm.v1.common_pb2 import CellState as CellStates
from etfarm.v1.device_pb2 import Device, DeviceEvent
from etfarm.v1.job_pb2 import Cell, Job, JobChange, Progress
from etfarm.wire import status
from etfarm.wire.errors import Fault, Kind, error_of
from tests.support.fake_servers import stubs_of
from tests.support.refusals import refuses

WAIT_S = 60.0
LIVE, DONE = job_pb2.JOB_STATE_RUNNING, job_pb2.JOB_STATE_SUCCEEDED


class Farm(device_pb2_grpc.DeviceServiceServicer, job_pb2_grpc.JobServiceServicer):
    """A server whose streams send what the test gives them: a list for each connection, which then breaks."""

    def __init__(self) -> None:
        self.devices: list[list[DeviceEvent]] = []
        self.jobs: list[list[JobChange]] = []
        self.renewed = asyncio.Event()
        self.released: list[str] = []
        self.ended: EtfarmError | None = None

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for event in self.devices.pop(0):
            yield event
        await context.abort(grpc.StatusCode.UNAVAILABLE if self.devices else grpc.StatusCode.DATA_LOSS, "broken")

    async def WatchAll(self, request: Any, context: Any) -> AsyncIterator[JobChange]:
        for change in self.jobs.pop(0):
            yield change
        await context.abort(grpc.StatusCode.UNAVAILABLE if self.jobs else grpc.StatusCode.DATA_LOSS, "broken")

    async def Get(self, request: Any, context: Any) -> Any:
        return Job(id=request.job_id, state=DONE)

    async def Reserve(self, request: device_pb2.ReserveDeviceRequest, context: Any) -> device_pb2.Reservation:
        assert request.request_id
        return device_pb2.Reservation(id="r1", device_ids=["a", "b"], owner="ann", duration_s=request.duration_s)

    async def Renew(self, request: device_pb2.RenewReservationRequest, context: Any) -> device_pb2.Reservation:
        self.renewed.set()
        if self.ended is not None:
            await context.abort_with_status(status.to_status(self.ended))
        return device_pb2.Reservation(id="r1", device_ids=["a", "b"])

    async def Release(self, request: Any, context: Any) -> device_pb2.ReleaseReservationResponse:
        self.released.append(request.reservation_id)
        return device_pb2.ReleaseReservationResponse()


@pytest.fixture
async def farm() -> AsyncIterator[tuple[Farm, Stubs]]:
    served = Farm()
    async with stubs_of(served) as stubs:
        yield served, stubs


async def changes(stubs: Stubs) -> list[DeviceChange]:
    """Return the changes until the last stream breaks."""
    received: list[DeviceChange] = []
    with pytest.raises(EtfarmError):
        async for change in watches.watch_devices(stubs, "", telemetry=True):
            received.append(change)
    return received


async def jobs(stubs: Stubs) -> list[JobInfo]:
    received: list[JobInfo] = []
    with pytest.raises(EtfarmError):
        async for job in watches.watch_jobs(stubs, ""):
            received.append(job)
    return received


async def test_a_new_snapshot_yields_what_has_changed_in_the_meantime(farm: tuple[Farm, Stubs]) -> None:
    served, stubs = farm
    a, b, c = (Device(id=name, name=name) for name in "abc")
    complete = DeviceEvent(snapshot_complete=True)
    newer = Device(id="b", name="b", labels={"rack": "3"})
    served.devices = [
        [DeviceEvent(device=a), DeviceEvent(device=b), complete, DeviceEvent(removed_device_id="a"), DeviceEvent(device=c)],
        [DeviceEvent(device=newer), complete],
    ]
    received = [(each.device_id, each.device is not None) for each in await changes(stubs)]
    assert received == [("a", True), ("b", True), ("a", False), ("c", True), ("b", True), ("c", False)]


async def test_jobs_that_ended_in_the_meantime_are_asked_for(farm: tuple[Farm, Stubs]) -> None:
    served, stubs = farm
    cells = [Cell(id=f"c{index}", index=index, version=2, state=CellStates.CELL_STATE_COMPILING) for index in range(2)]
    first, second = (Job(id=name, state=LIVE, cells=cells) for name in ("first", "second"))
    outdated = Cell(id="c0", index=0, version=2, state=CellStates.CELL_STATE_QUEUED)
    running = Cell(id="c1", index=1, version=3, state=CellStates.CELL_STATE_RUNNING)
    begins, complete = JobChange(snapshot_begins=True), JobChange(snapshot_complete=True)
    served.jobs = [
        [
            begins, JobChange(job_id="first", job=first), JobChange(job_id="second", job=second), complete,
            JobChange(job_id="first", cell=outdated, job_state=LIVE),
            JobChange(job_id="first", cell=running, job_state=LIVE),
            JobChange(job_id="first", job=Job(id="first", state=DONE), job_state=DONE),
        ],
        [begins, complete],
    ]  # fmt: skip
    received = await jobs(stubs)
    assert [(job.id, job.state.value) for job in received] == [
        ("first", "RUNNING"), ("second", "RUNNING"), ("first", "RUNNING"), ("first", "SUCCEEDED"), ("second", "SUCCEEDED")
    ]  # fmt: skip
    assert [cell.state for cell in received[2].cells] == [CellState.COMPILING, CellState.RUNNING]
    assert len(received[3].cells) == 2, "the end of a job comes without its cells, which are known"
    assert received[-1].state is JobState.SUCCEEDED


async def test_a_job_waits_while_none_of_its_live_cells_works(farm: tuple[Farm, Stubs]) -> None:
    served, stubs = farm
    cells = [
        Cell(id="c0", index=0, version=2, state=CellStates.CELL_STATE_COMPILING, phase="WAIT_FOR_WORKER"),
        Cell(id="c1", index=1, version=2, state=CellStates.CELL_STATE_WAITING_FOR_DEVICE),
        Cell(id="c2", index=2, version=9, state=CellStates.CELL_STATE_SUCCEEDED),
    ]
    running = Cell(id="c1", index=1, version=3, state=CellStates.CELL_STATE_RUNNING)
    served.jobs = [
        [
            JobChange(snapshot_begins=True), JobChange(job_id="j", job=Job(id="j", state=LIVE, cells=cells)),
            JobChange(snapshot_complete=True),
            JobChange(job_id="j", progress=Progress(cell_id="c0", phase="COMPILE")),
            JobChange(job_id="j", progress=Progress(cell_id="c0", phase="WAIT_FOR_ROOM")),
            JobChange(job_id="j", progress=Progress(cell_id="c0", phase="WAIT_FOR_ROOM")),
            JobChange(job_id="j", cell=running, job_state=LIVE),
            JobChange(job_id="j", job=Job(id="j", state=DONE), job_state=DONE),
        ]
    ]  # fmt: skip
    received = await jobs(stubs)
    assert [summary.describe_state(job) for job in received] == ["WAITING", "RUNNING", "WAITING", "RUNNING", "SUCCEEDED"]
    assert summary.describe_work(received[0]) == "1 waiting for a compile worker, 1 waiting for device"
    assert summary.describe_work(received[1]) == "1 compiling, 1 waiting for device"


@pytest.mark.remedy("RESERVATION_NOT_OPEN")
async def test_a_reservation_is_renewed_until_it_is_released(farm: tuple[Farm, Stubs]) -> None:
    served, stubs = farm
    reservation = AsyncReservation(lambda: stubs, device_pb2.ReserveDeviceRequest(count=2, duration_s=0.1))
    with refuses("RESERVATION_NOT_OPEN"):
        assert reservation.id
    async with reservation:
        assert (reservation.id, reservation.device_ids, reservation.ended) == ("r1", ("a", "b"), None)
        await asyncio.wait_for(served.renewed.wait(), WAIT_S)
    assert served.released == ["r1"]


async def test_the_holder_learns_that_a_reservation_has_ended(farm: tuple[Farm, Stubs]) -> None:
    served, stubs = farm
    ended: asyncio.Future[EtfarmError] = asyncio.get_running_loop().create_future()
    served.ended = error_of(Fault.USER, "RESERVATION_ENDED", "It was released by root.")
    served.ended.kind = Kind.FAILED_PRECONDITION
    async with AsyncReservation(lambda: stubs, device_pb2.ReserveDeviceRequest(duration_s=0.1), ended.set_result) as reservation:
        error = await asyncio.wait_for(ended, WAIT_S)
        assert reservation.ended is error and error.reason == "RESERVATION_ENDED"
    assert served.released == [], "there is nothing to release"
