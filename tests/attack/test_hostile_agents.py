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
    job_pb2,
    session_pb2,
)
from etfarm.wire.channel import CLIENT_OPTIONS, Access, open_channel
from etfarm.wire.chunks import artifact_of
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.agent_stream import AgentStream
from tests.support.farm import private_file, serve
from tests.support.farm_calls import FarmCalls, open_channels
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.runner import runner_archive
from tests.support.session_ends import Caller, answered, session_on, welcomed

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
    assert (await refusal(is_welcome(refused))).reason == "LIMIT_EXCEEDED"


async def test_an_agent_that_does_not_read_its_answers_is_not_read_either(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise gRPC's own window grows with what it receives.
    monkeypatch.setattr(etfarm.wire.channel, "CLIENT_OPTIONS", [*CLIENT_OPTIONS, ("grpc.http2.bdp_probe", 0)])
    sent, acknowledged = 9_000, 0
    async with open_channel(Access(server, TOKENS["thief"])) as channel:
        deaf = await welcomed(channel, "deaf", devices=[])
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


async def test_an_answer_of_a_session_has_what_its_agent_uploaded_or_is_the_devices_fault(
    channels: dict[str, grpc.aio.Channel],
) -> None:
    pte = await FarmCalls(channels["ann"]).put(program("add").bytes)
    thief = await welcomed(channels["thief"], "server")
    caller = Caller(channels["ann"], session_on(thief, pte))
    serving = thief.serve(await thief.started())
    await caller.event("ready")
    own, never = [await FarmCalls(channels["thief"]).put(each) for each in (b"an output", b"that no call asked for")]
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
    samples = await FarmCalls(channels["thief"]).put(array("q", [1_000_000] * 100).tobytes())
    thief = await welcomed(channels["thief"], request.node.callspec.id)
    result = agent_pb2.CandidateResult(
        threads=1, iterations=100, duration_ns=100_000_000, stop_reason=common_pb2.STOP_REASON_ENOUGH, samples=samples,
        outputs=samples,
    )  # fmt: skip
    for field, value in claim.items():
        if isinstance(value, int):
            getattr(result, field).size_bytes = value
        elif isinstance(value, list):
            getattr(result, field).extend(value)
    measurement = job_pb2.Measurement(iterations=100, no_profile=True)
    # The pass takes 0.1 s.
    (cell,) = (await answered(channels["ann"], thief, result, pause_s=0.2, measurement=measurement)).cells
    assert (cell.error.reason, cell.error.fault) == ("RESULT_IMPLAUSIBLE", common_pb2.FAULT_DEVICE)
    thief.close()


async def test_a_job_stays_small_whatever_its_agent_reports(channels: dict[str, grpc.aio.Channel]) -> None:
    thief = await welcomed(channels["thief"], "chatty")
    texts = {f"text {number}": "\N{PILE OF POO}" * 30_000 for number in range(100)}
    error = common_pb2.Error(
        fault=common_pb2.FAULT_DEVICE, reason="BROKEN", message="m" * 30_000, remedy="r" * 8_000, metadata=texts
    )
    result = agent_pb2.CandidateResult(error=error)
    for _ in range(1_000):
        result.phases.add(phase="\N{PILE OF POO}" * 1_000)
    ended = await answered(channels["ann"], thief, result)
    (cell,) = ended.cells
    assert (cell.error.reason, cell.error.fault) == ("BROKEN", common_pb2.FAULT_DEVICE)
    assert cell.error.message.startswith("m" * 4_000) and cell.error.metadata
    assert cell.error.ByteSize() <= 64 << 10
    assert ended.ByteSize() < 1 << 20
    thief.close()
