"""Agents with valid tokens that flood, claim and lie, against a real server: what they cost, and whose fault it is."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import grpc
import psutil
import pytest

import etfarm.wire.channel
from etfarm.client import Farm
from etfarm.v1 import (
    agent_pb2,
    artifact_pb2,
    artifact_pb2_grpc,
    common_pb2,
    compile_pb2,
    job_pb2,
    job_pb2_grpc,
    session_pb2,
)
from etfarm.wire import digest
from etfarm.wire.channel import CLIENT_OPTIONS, Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.agent_stream import AgentStream
from tests.support.farm import private_file, serve
from tests.support.farm_calls import open_channels
from tests.support.programs import program
from tests.support.runner import runner_archive
from tests.support.session_ends import Agent, Caller

pytestmark = pytest.mark.slow(reason="attacks a real server with agents")

WAIT_S = 120.0
PEOPLE = {"root": "admin", "ann": "user", "thief": "agent"}
TOKENS = {name: f"token-of-{name}-0123456789" for name in PEOPLE}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address and process."""
    folder = tmp_path_factory.mktemp("hostile")
    tokens = private_file(folder / "tokens", "".join(f"{name} {role} {TOKENS[name]}\n" for name, role in PEOPLE.items()))
    with serve(folder, "--tokens", str(tokens), executes=True) as daemon:
        address = daemon.expect("listening on").rpartition(" ")[2]
        with Farm(address, token=TOKENS["root"]) as farm:
            farm.add_bundle(runner_archive())
        yield address, psutil.Process(daemon.pid)
    assert "Traceback" not in daemon.log.read_text()


@pytest.fixture
def server(running: tuple[str, psutil.Process]) -> str:
    return running[0]


@pytest.fixture
async def channels(server: str) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    async with open_channels(server, TOKENS) as opened:
        yield opened


@contextmanager
def suppressed(code: grpc.StatusCode) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        assert error.code() is code, error


async def is_welcome(agent: AgentStream) -> None:
    async with asyncio.timeout(WAIT_S):
        message = await agent.stream.read()
    assert isinstance(message, agent_pb2.ServerMessage) and message.HasField("welcome"), message


async def test_what_an_agent_says_at_first_does_not_stay_in_memory(
    running: tuple[str, psutil.Process], channels: dict[str, grpc.aio.Channel]
) -> None:
    """One token may have a thousand agents, each with a Hello of up to 32 MiB."""
    attempts = [f"{number:05}" + "\N{PILE OF POO}" * 95 for number in range(10_000)]
    hello = agent_pb2.Hello(protocol_version=PROTOCOL_VERSION, unacknowledged_attempts=attempts)
    agents = []
    for number in range(31):
        hello.agent_id = f"large-{number}"
        agents.append(AgentStream(channels["thief"], hello))
        await is_welcome(agents[-1])
        if number == 0:
            before = running[1].memory_info().rss
    assert running[1].memory_info().rss - before < 30 * hello.ByteSize() / 2
    for agent in agents:
        agent.close()
    hello.unacknowledged_attempts[0] += "longer than any"
    refused = AgentStream(channels["thief"], hello)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await is_welcome(refused)
    assert from_rpc_error(error.value, server="here").reason == "LIMIT_EXCEEDED"


async def test_an_agent_that_does_not_read_its_answers_is_not_read_either(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise gRPC's own window grows with what it receives.
    monkeypatch.setattr(etfarm.wire.channel, "CLIENT_OPTIONS", [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)])
    sent, acknowledged = 9_000, 0
    async with open_channel(Access(server, TOKENS["thief"])) as channel:
        deaf = Agent(channel, "deaf", devices=[])
        await is_welcome(deaf)
        for _ in range(sent):
            deaf.send(agent_pb2.AgentMessage(run_result=agent_pb2.RunResult(attempt_id="\N{PILE OF POO}" * 1_000)))
        deaf.outgoing.put_nowait(None)
        # It counts as dead after 15 s, as if it had sent nothing.
        await asyncio.sleep(25)
        # grpc.aio may end a call with INTERNAL where the server ends it during a write.
        async with asyncio.timeout(WAIT_S):
            with suppressed(grpc.StatusCode.INTERNAL):
                while isinstance(message := await deaf.stream.read(), agent_pb2.ServerMessage):
                    acknowledged += 1
                    assert len(message.ack.attempt_id) <= 100
    assert 0 < acknowledged < sent / 2


async def stored(channel: grpc.aio.Channel, data: bytes) -> common_pb2.Artifact:
    artifact = artifact_of(data)
    await upload(artifact_pb2_grpc.ArtifactServiceStub(channel), artifact, data)
    return artifact


async def test_an_answer_of_a_session_has_what_its_agent_uploaded_or_is_the_devices_fault(
    channels: dict[str, grpc.aio.Channel],
) -> None:
    pte = await stored(channels["ann"], program("add").path.read_bytes())
    thief = Agent(channels["thief"], "server")
    await is_welcome(thief)
    created = compile_pb2.Program(pte=pte, digest=digest.of_program(pte.digest, {}))
    caller = Caller(channels["ann"], session_pb2.OpenSessionRequest(selector=f"id={thief.devices[0].id}", program=created))
    serving = thief.serve(await thief.started())
    await caller.event("ready")
    own = await stored(channels["thief"], b"an output")
    never = await stored(channels["thief"], b"an output that no call asked for")
    Tensors = session_pb2.SessionTensors
    wrong = [
        (1, Tensors(artifact=artifact_of(b"never uploaded"))),
        (1, Tensors(artifact=common_pb2.Artifact(digest=own.digest, size_bytes=1 << 62))),
        (1, Tensors(inline=bytes(2 << 20))),
        (-1, Tensors(inline=b"x")),
    ]
    for number, (run_ns, outputs) in enumerate([*wrong, (1, Tensors(artifact=own))]):
        serving.answer("nobody", 1, Tensors(artifact=never))
        calling = caller.call(str(number))
        serving.answer((await serving.call()).call_id, run_ns, outputs)
        serving.answer(str(number), 9, Tensors(artifact=never))
        error = (await calling).answer.error
        expected = ("BAD_ANSWER", common_pb2.FAULT_DEVICE) if number < len(wrong) else ("", common_pb2.FAULT_UNSPECIFIED)
        assert (error.reason, error.fault) == expected, (number, error)
    missing = await artifact_pb2_grpc.ArtifactServiceStub(channels["ann"]).FindMissing(
        artifact_pb2.FindMissingArtifactsRequest(digests=[own.digest, never.digest])
    )
    assert list(missing.missing) == [never.digest]
    serving.end()
    await caller.event("ended")
    thief.close()


@pytest.mark.parametrize(
    "claim",
    [
        {"outputs": 1 << 62},
        {"samples": 1},
        {"blocks": [agent_pb2.InterleavedBlock(samples=100)]},
    ],
    ids=["large outputs", "small samples", "blocks"],
)
async def test_a_result_that_contradicts_its_files_or_plan_is_the_devices_fault(
    channels: dict[str, grpc.aio.Channel], claim: dict[str, object], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    pte = await stored(channels["ann"], program("add").path.read_bytes())
    samples = await stored(channels["thief"], array("q", [1_000_000] * 100).tobytes())
    thief = Agent(channels["thief"], name)
    await is_welcome(thief)
    jobs = job_pb2_grpc.JobServiceStub(channels["ann"])
    spec = job_pb2.JobSpec(
        name=name, candidates=[job_pb2.Candidate(name="add", program=compile_pb2.Program(pte=pte))],
        devices=[job_pb2.DeviceChoice(selector=f"id={thief.devices[0].id}")],
        measurement=job_pb2.Measurement(iterations=100, no_profile=True),
    )  # fmt: skip
    job = await jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=name, spec=spec))
    for _ in range(3):
        start = await thief.started()
        result = agent_pb2.CandidateResult(
            cell_id=start.candidates[0].cell_id, threads=1, iterations=100, duration_ns=100_000_000,
            stop_reason=common_pb2.STOP_REASON_ENOUGH, samples=samples, outputs=samples,
        )  # fmt: skip
        for field, value in claim.items():
            if isinstance(value, int):
                getattr(result, field).size_bytes = value
            elif isinstance(value, list):
                getattr(result, field).extend(value)
        answer = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id, candidates=[result])
        await asyncio.sleep(0.2)  # the pass takes 0.1 s
        thief.send(agent_pb2.AgentMessage(run_result=answer))
    async with asyncio.timeout(WAIT_S):
        async for _ in jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
            pass
    (cell,) = (await jobs.Get(job_pb2.GetJobRequest(job_id=job.id))).cells
    assert (cell.error.reason, cell.error.fault) == ("RESULT_IMPLAUSIBLE", common_pb2.FAULT_DEVICE)
    thief.close()


async def test_a_job_stays_small_whatever_its_agent_reports(channels: dict[str, grpc.aio.Channel]) -> None:
    pte = await stored(channels["ann"], program("add").path.read_bytes())
    thief = Agent(channels["thief"], "chatty")
    await is_welcome(thief)
    jobs = job_pb2_grpc.JobServiceStub(channels["ann"])
    spec = job_pb2.JobSpec(
        name="chatty", candidates=[job_pb2.Candidate(name="add", program=compile_pb2.Program(pte=pte))],
        devices=[job_pb2.DeviceChoice(selector=f"id={thief.devices[0].id}")],
    )  # fmt: skip
    job = await jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id="chatty", spec=spec))
    texts = {f"text {number}": "\N{PILE OF POO}" * 30_000 for number in range(100)}
    for _ in range(3):
        start = await thief.started()
        result = agent_pb2.CandidateResult(
            cell_id=start.candidates[0].cell_id,
            error=common_pb2.Error(
                fault=common_pb2.FAULT_DEVICE, reason="BROKEN", message="m" * 30_000, remedy="r" * 8_000, metadata=texts
            ),
        )
        for _ in range(1_000):
            result.phases.add(phase="\N{PILE OF POO}" * 1_000)
        answer = agent_pb2.RunResult(attempt_id=start.attempt_id, device_id=start.device_id, candidates=[result])
        thief.send(agent_pb2.AgentMessage(run_result=answer))
    async with asyncio.timeout(WAIT_S):
        async for _ in jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id)):
            pass
    ended = await jobs.Get(job_pb2.GetJobRequest(job_id=job.id))
    (cell,) = ended.cells
    assert (cell.error.reason, cell.error.fault) == ("BROKEN", common_pb2.FAULT_DEVICE)
    assert cell.error.message.startswith("m" * 4_000) and cell.error.metadata
    assert cell.error.ByteSize() <= 64 << 10
    assert ended.ByteSize() < 1 << 20
    thief.close()
