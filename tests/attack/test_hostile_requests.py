"""Hostile input of users and agents to a real server: it is refused, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import etfarm.wire.channel
from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    artifact_pb2_grpc,
    common_pb2,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    farm_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    report_pb2,
    report_service_pb2_grpc,
    session_pb2,
)
from etfarm.wire import digest, tensors
from etfarm.wire.channel import CLIENT_OPTIONS, Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support import refusals
from tests.support.farm import FarmProcess
from tests.support.farm_calls import FarmCalls
from tests.support.programs import program
from tests.support.runner import runner_archive
from tests.support.session_ends import Agent, Caller, session_on, welcomed

pytestmark = pytest.mark.slow(reason="each test attacks a farm of its own")

WAIT_S = 120.0
"""For what needs a compile worker, which has to warm up first."""
PROMPTLY_S = 10.0
"""For a refusal and for the answers to others, on a busy machine: what froze the farm took 39 s on an idle one."""
refusal = partial(refusals.refusal, within_s=PROMPTLY_S)
OTHERS = 20
BLANKS = "name=" + " " * 100_000 + "x\ny"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A server that the tests share; the data that they leave does not affect each other."""
    with FarmProcess(tmp_path_factory.mktemp("limits"), bundle=False, executes=True) as running:
        running.restart()
        with running.client() as farm:
            farm.add_bundle(runner_archive())
        yield running


@pytest.fixture
async def channel(served: FarmProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(Access(served.address)) as opened:
        yield opened


async def first_event(stream: Any) -> Any:
    return await stream.read()


@contextlib.asynccontextmanager
async def others_are_served(address: str) -> AsyncIterator[None]:
    """Require that another client is answered while the block runs."""
    async with open_channel(Access(address)) as channel:
        farm, jobs = farm_pb2_grpc.FarmServiceStub(channel), job_pb2_grpc.JobServiceStub(channel)
        devices = device_pb2_grpc.DeviceServiceStub(channel)
        await farm.GetServerInfo(farm_pb2.GetServerInfoRequest())

        async def ask() -> None:
            async with asyncio.timeout(PROMPTLY_S):
                for _ in range(OTHERS):
                    await farm.GetServerInfo(farm_pb2.GetServerInfoRequest())
                    await jobs.List(job_pb2.ListJobsRequest())
                    await devices.List(device_pb2.ListDevicesRequest(selector="arch=none"))

        asking = asyncio.create_task(ask())
        try:
            yield
        finally:
            await asking


def rss_peak_bytes(pid: int) -> int:
    """Return the peak memory of a process since the last reset."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def forget_peak(pid: int) -> int:
    """Reset the peak to the current memory of the process, and return it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return rss_peak_bytes(pid)


def pid_of(served: FarmProcess) -> int:
    assert served.server is not None
    return served.server.pid


SELECTORS: dict[str, Callable[[grpc.aio.Channel], Awaitable[Any]]] = {
    "DeviceService.List": lambda channel: device_pb2_grpc.DeviceServiceStub(channel).List(
        device_pb2.ListDevicesRequest(selector=BLANKS)
    ),
    "JobService.Submit": lambda channel: job_pb2_grpc.JobServiceStub(channel).Submit(
        job_pb2.SubmitJobRequest(request_id="r", spec=job_pb2.JobSpec(devices=[job_pb2.DeviceChoice(selector=BLANKS)]))
    ),
    "ReportService.ListHistory": lambda channel: report_service_pb2_grpc.ReportServiceStub(channel).ListHistory(
        report_pb2.ListHistoryRequest(model="net", device=BLANKS)
    ),
    "SessionService.Open": lambda channel: first_event(
        Caller(channel, session_pb2.OpenSessionRequest(selector=BLANKS, program={"digest": "d"})).events  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("rpc", SELECTORS)
async def test_a_selector_that_froze_the_farm_is_refused_and_others_are_served(
    served: FarmProcess, channel: grpc.aio.Channel, rpc: str
) -> None:
    async with others_are_served(served.address):
        errors = await asyncio.gather(*(refusal(SELECTORS[rpc](channel)) for _ in range(4)))
    assert {error.reason for error in errors} == {"BAD_SELECTOR"}
    assert errors[0].metadata["limit"] == "4096"


async def test_the_longest_allowed_selectors_do_not_delay_others(served: FarmProcess, channel: grpc.aio.Channel) -> None:
    stub = device_pb2_grpc.DeviceServiceStub(channel)
    longest = "name=y" + " " * 4088 + "\nx"
    async with others_are_served(served.address):
        errors = await asyncio.gather(*(refusal(stub.List(device_pb2.ListDevicesRequest(selector=longest))) for _ in range(50)))
    assert {error.reason for error in errors} == {"BAD_SELECTOR"}


async def test_overlong_names_are_refused(served: FarmProcess, channel: grpc.aio.Channel) -> None:
    stub = job_pb2_grpc.JobServiceStub(channel)
    huge = "x" * (7 << 20)
    specs = {
        "JobSpec.name": job_pb2.JobSpec(name=huge),
        "JobSpec.LabelsEntry.value": job_pb2.JobSpec(labels={"k": huge}),
        "JobSpec.LabelsEntry.key": job_pb2.JobSpec(labels={huge: "v"}),
        "JobSpec.labels": job_pb2.JobSpec(labels={str(number): "v" for number in range(65)}),
        "Candidate.name": job_pb2.JobSpec(candidates=[job_pb2.Candidate(name=huge)]),
        "Candidate.recipe": job_pb2.JobSpec(candidates=[job_pb2.Candidate(recipe=huge)]),
        "SubmitJobRequest": job_pb2.JobSpec(name="x" * (25 << 20)),
    }
    for field, spec in specs.items():
        async with others_are_served(served.address):
            error = await refusal(
                stub.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=field, spec=spec))
            )
        assert (error.reason, error.metadata["field"]) == ("LIMIT_EXCEEDED", field)
    assert (await stub.List(job_pb2.ListJobsRequest())).jobs is not None


async def test_bytes_that_decode_to_gigabytes_are_refused_without_their_memory(
    served: FarmProcess, channel: grpc.aio.Channel
) -> None:
    empty_candidates = b"\x12" + b"\xfe\xff\xff\x03" + b"\x1a\x00" * ((4 << 20) - 1)
    submit = channel.unary_unary("/etfarm.v1.JobService/Submit")
    before = forget_peak(pid_of(served))
    async with others_are_served(served.address):
        errors = [await refusal(submit(empty_candidates)) for _ in range(3)]
    assert {(error.reason, error.metadata["field"]) for error in errors} == {("LIMIT_EXCEEDED", "SubmitJobRequest")}
    assert rss_peak_bytes(pid_of(served)) - before < 200 << 20, "decoded they take 600 MB"


def announced(agent_id: str, devices: list[device_pb2.Device]) -> agent_pb2.AgentMessage:
    return agent_pb2.AgentMessage(hello=agent_pb2.Hello(agent_id=agent_id, protocol_version=PROTOCOL_VERSION, devices=devices))


async def test_agents_can_neither_flood_the_farm_with_devices_nor_make_its_list_unreadable(breakable: FarmProcess) -> None:
    breakable.restart()
    known: set[str] = set()
    async with open_channel(Access(breakable.address)) as channel:
        stub, devices = agent_pb2_grpc.AgentServiceStub(channel), device_pb2_grpc.DeviceServiceStub(channel)

        async def connect(message: agent_pb2.AgentMessage) -> Any:
            stream = stub.Connect()
            await stream.write(message)
            return stream

        flood = [device_pb2.Device(id=f"flood-{number}") for number in range(12_000)]
        async with others_are_served(breakable.address):
            error = await refusal((await connect(announced("a", flood))).read())
        assert (error.reason, error.metadata["field"]) == ("LIMIT_EXCEEDED", "Hello.devices")
        labels = {"k": "x" * (20 << 20)}
        error = await refusal((await connect(announced("b", [device_pb2.Device(id="b", labels=labels)]))).read())
        assert (error.reason, error.metadata["field"]) == ("LIMIT_EXCEEDED", "Device.LabelsEntry.value")
        fat = device_pb2.Device(id="c", features=["f" * 900] * 400)
        error = await refusal((await connect(announced("c", [fat]))).read())
        assert (error.reason, error.metadata["device"]) == ("DEVICE_TOO_LARGE", "c")
        # As many as an agent may have, and then others, one after the other.
        mine = [device_pb2.Device(id=f"mine-{number:04}", name="n" * 200) for number in range(1_000)]
        stream = await connect(announced("d", mine))
        assert (await stream.read()).HasField("welcome")
        for number in range(50):
            more = agent_pb2.DeviceUpdate(device=device_pb2.Device(id=f"more-{number}"))
            await stream.write(agent_pb2.AgentMessage(device_update=more))
        late = agent_pb2.RunResult(attempt_id="unknown")
        await stream.write(agent_pb2.AgentMessage(run_result=late))
        assert (await stream.read()).ack.attempt_id == "unknown", "all before it was looked at"
        stream.cancel()
        token = ""
        while True:
            answer = await devices.List(device_pb2.ListDevicesRequest(page_size=300, page_token=token))
            assert len(answer.devices) <= 300
            assert not known.intersection(device.id for device in answer.devices)
            known.update(device.id for device in answer.devices)
            if not (token := answer.next_page_token):
                break
    assert known == {device.id for device in mine}
    breakable.kill9()
    breakable.restart()
    with breakable.client() as farm:
        assert {device.id for device in farm.devices()} == known


async def test_an_agent_that_does_not_read_is_disconnected(
    served: FarmProcess, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise gRPC's own window grows with what it receives.
    monkeypatch.setattr(etfarm.wire.channel, "CLIENT_OPTIONS", [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)])
    devices = device_pb2_grpc.DeviceServiceStub(channel)
    before = forget_peak(pid_of(served))
    attempt = "\N{PILE OF POO}" * 90

    async def results() -> AsyncIterator[agent_pb2.AgentMessage]:
        yield announced("deaf", [device_pb2.Device(id="deaf-device")])
        for number in range(200_000):
            yield agent_pb2.AgentMessage(run_result=agent_pb2.RunResult(attempt_id=f"{attempt}{number}"))
        await asyncio.Event().wait()

    async def state() -> int:
        with contextlib.suppress(grpc.aio.AioRpcError):
            return (await devices.Get(device_pb2.GetDeviceRequest(device_id="deaf-device"))).state
        return device_pb2.DEVICE_STATE_UNSPECIFIED

    async with open_channel(Access(served.address)) as of_agent:
        stream = agent_pb2_grpc.AgentServiceStub(of_agent).Connect(results())
        async with others_are_served(served.address), asyncio.timeout(WAIT_S):
            # It never falls silent: the server no longer receives from an agent that does not read.
            while await state() != device_pb2.DEVICE_STATE_OFFLINE:
                pass
        stream.cancel()
    assert rss_peak_bytes(pid_of(served)) - before < 100 << 20


def tensor_file(entries: list[dict[str, Any]], payload: bytes = b"") -> bytes:
    text = json.dumps({"values": entries}).encode()
    return tensors.MAGIC + struct.pack("<I", len(text)) + text + payload


async def submitted(channel: grpc.aio.Channel, inputs: bytes, agent: Agent) -> job_pb2.Job:
    """Submit a compiled program with these inputs, and return the finished job."""
    artifacts, jobs = artifact_pb2_grpc.ArtifactServiceStub(channel), job_pb2_grpc.JobServiceStub(channel)
    created = program("conv")
    for data in (created.bytes, inputs):
        await upload(artifacts, artifact_of(data), data)
    spec = job_pb2.JobSpec(name="inputs", devices=[job_pb2.DeviceChoice(selector=f"id={agent.devices[0].id}")])
    candidate = spec.candidates.add(name="conv")
    candidate.program.pte.digest = digest.of_bytes(created.bytes)
    spec.inputs["forward"].digest = digest.of_bytes(inputs)
    job = await jobs.Submit(
        job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=digest.of_bytes(inputs), spec=spec)
    )
    async with asyncio.timeout(WAIT_S):
        async for event in jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
            if event.job_state in (job_pb2.JOB_STATE_FAILED, job_pb2.JOB_STATE_SUCCEEDED):
                break
    return await jobs.Get(job_pb2.GetJobRequest(job_id=job.id))


async def test_an_inputs_file_of_60000_dimensions_does_not_delay_others(served: FarmProcess, channel: grpc.aio.Channel) -> None:
    rank = 60_000
    entry = {
        "name": "x", "kind": "tensor", "dtype": "float32", "shape": [(1 << 62) + 1] * rank,
        "dim_order": list(reversed(range(rank))), "offset": 0, "size_bytes": 16,
    }  # fmt: skip
    agent = await welcomed(channel, "dims")
    async with others_are_served(served.address):
        job = await submitted(channel, tensor_file([entry], bytes(16)), agent)
    agent.outgoing.put_nowait(None)
    (cell,) = job.cells
    assert (cell.state, cell.error.reason) == (common_pb2.CELL_STATE_FAILED, "BAD_TENSOR_FILE")
    assert "at most 64 dims, got 60000" in cell.error.message


async def test_the_inputs_of_a_user_are_not_loaded_into_the_daemon(served: FarmProcess, channel: grpc.aio.Channel) -> None:
    size = 256 << 20
    inputs = tensors.encode([tensors.Tensor("x", "uint8", (size,), bytes(size))])
    agent = await welcomed(channel, "large")
    before = forget_peak(pid_of(served))
    async with others_are_served(served.address):
        job = await submitted(channel, inputs, agent)
    agent.outgoing.put_nowait(None)
    assert job.cells[0].error.reason == "INPUT_MISMATCH"
    assert rss_peak_bytes(pid_of(served)) - before < 150 << 20


async def test_a_session_whose_owner_does_not_read_does_not_grow(served: FarmProcess, channel: grpc.aio.Channel) -> None:
    agent = await welcomed(channel, "chatty")
    asked = session_on(agent, await FarmCalls(channel).put(program("conv").bytes))
    async with open_channel(Access(served.address)) as owners:
        caller = Caller(owners, asked)
        serving = agent.serve(await agent.started())
        await caller.event("ready")
        before = forget_peak(pid_of(served))
        line = "y" * (60 << 10)
        async with others_are_served(served.address):
            for _ in range(5_000):  # 300 MB
                serving.line(line)
            serving.end()
            async with asyncio.timeout(WAIT_S):
                await serving.stream.code()
        assert rss_peak_bytes(pid_of(served)) - before < 100 << 20
        assert (await caller.event("ended")).ended.reason == "SESSION_LOST"
    agent.outgoing.put_nowait(None)


async def test_exceeded_quotas_are_refused_by_name_and_others_continue(tmp_path_factory: pytest.TempPathFactory) -> None:
    quotas = ["--quota", "live_jobs_per_user=1", "--quota", "streams_per_user=1", "--quota", "sessions_per_user=1"]
    with FarmProcess(tmp_path_factory.mktemp("quotas"), bundle=False, serve=quotas) as running:
        running.restart()
        with running.client() as farm:
            farm.add_bundle(runner_archive())
        async with open_channel(Access(running.address)) as channel:
            jobs = job_pb2_grpc.JobServiceStub(channel)
            agent = await welcomed(channel, "one")
            data = program("conv").bytes
            await upload(artifact_pb2_grpc.ArtifactServiceStub(channel), artifact_of(data), data)
            spec = job_pb2.JobSpec(devices=[job_pb2.DeviceChoice()])
            spec.candidates.add(name="conv").program.pte.digest = digest.of_bytes(data)
            first = await jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="1", spec=spec))
            error = await refusal(
                jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="2", spec=spec))
            )
            assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXCEEDED", "live_jobs_per_user")
            assert "etfarm jobs cancel" in error.remedy
            watching = jobs.Watch(job_pb2.WatchJobRequest(job_id=first.id))
            assert (await watching.read()).sequence == 1
            error = await refusal(jobs.Watch(job_pb2.WatchJobRequest(job_id=first.id)).read())
            assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXCEEDED", "streams_per_user")
            asked = session_pb2.OpenSessionRequest()
            asked.program.pte.CopyFrom(artifact_of(data))
            asked.program.digest = digest.of_program(asked.program.pte.digest, {})
            caller = Caller(channel, asked)
            await caller.event("waiting")
            error = await refusal(Caller(channel, asked).events.read())
            assert (error.reason, error.metadata["quota"]) == ("QUOTA_EXCEEDED", "sessions_per_user")
            caller.events.cancel()
            await jobs.Cancel(job_pb2.CancelJobRequest(job_id=first.id))
            async with asyncio.timeout(WAIT_S):
                while await watching.read() is not grpc.aio.EOF:
                    pass
            second = await jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="3", spec=spec))
            await jobs.Cancel(job_pb2.CancelJobRequest(job_id=second.id))
            agent.outgoing.put_nowait(None)
