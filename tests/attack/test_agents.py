"""Agents with valid tokens that claim foreign identities, or report implausible measurements. Real server, raw streams."""

from __future__ import annotations

import asyncio
import platform
from array import array
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from etfarm.client import Farm
from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    artifact_pb2,
    artifact_pb2_grpc,
    common_pb2,
    device_pb2,
    device_pb2_grpc,
    job_pb2,
    project_pb2,
    project_pb2_grpc,
    session_pb2,
    token_pb2,
    token_pb2_grpc,
)
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.farm import private_file, serve
from tests.support.farm_calls import FarmCalls, open_channels
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.runner import runner_archive
from tests.support.session_ends import Agent, Caller, answered, session_on, welcomed

pytestmark = pytest.mark.slow(reason="attacks a real server with agents")

WAIT_S = 120.0
PEOPLE = {"root": "admin", "ann": "user", "rack": "agent", "thief": "agent"}
TOKENS = {name: f"token-of-{name}-0123456789" for name in PEOPLE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("agents")
    tokens = private_file(folder / "tokens", "".join(f"{name} {role} {TOKENS[name]}\n" for name, role in PEOPLE.items()))
    with serve(folder, "--tokens", str(tokens)) as daemon:
        address = daemon.expect("listening on").rpartition(" ")[2]
        with Farm(address, token=TOKENS["root"]) as farm:
            farm.add_bundle(runner_archive())
        yield address


@pytest.fixture
async def channels(server: str) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    async with open_channels(server, TOKENS) as opened:
        yield opened


async def ending(agent: Agent) -> str:
    """Return the reason for which the agent's stream ends."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await agent.stream.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, server="here").reason
    return ""


async def leave(agent: Agent) -> None:
    agent.outgoing.put_nowait(agent_pb2.AgentMessage(goodbye=agent_pb2.Goodbye()))
    await ending(agent)


async def test_a_silent_agents_identity_and_devices_cannot_be_taken_with_another_token(
    channels: dict[str, grpc.aio.Channel],
) -> None:
    board = await welcomed(channels["rack"], "board")
    await leave(board)
    assert await ending(Agent(channels["thief"], "board")) == "AGENT_NOT_YOURS"
    # As an agent of its own with the board's devices.
    assert await ending(Agent(channels["thief"], "fresh", devices=board.devices)) == "DEVICE_NOT_YOURS"
    # By an update, once it is welcome with a device of its own.
    thief = await welcomed(channels["thief"], "thief")
    update = agent_pb2.DeviceUpdate(device=board.devices[0])
    thief.send(agent_pb2.AgentMessage(device_update=update))
    await thief.has_read_all()
    devices = device_pb2_grpc.DeviceServiceStub(channels["ann"])
    known = await devices.Get(device_pb2.GetDeviceRequest(device_id=board.devices[0].id))
    assert (known.agent_id, known.state) == ("board", device_pb2.DEVICE_STATE_OFFLINE)
    await leave(thief)
    again = await welcomed(channels["rack"], "board")
    await leave(again)


@pytest.mark.remedy("DEVICE_CONNECTED")
async def test_an_admin_moves_an_identity_and_forgets_devices(channels: dict[str, grpc.aio.Channel]) -> None:
    admin = agent_pb2_grpc.AgentServiceStub(channels["root"])
    old = await welcomed(channels["rack"], "moved")
    bound = await admin.BindAgent(agent_pb2.BindAgentRequest(agent_id="moved", principal="thief"))
    assert (bound.principal, sorted(bound.device_ids)) == ("thief", sorted(device.id for device in old.devices))
    assert await ending(old) == "", "its stream ends"
    assert await ending(Agent(channels["rack"], "moved")) == "AGENT_NOT_YOURS"
    new = await welcomed(channels["thief"], "moved")
    devices = device_pb2_grpc.DeviceServiceStub(channels["root"])
    connected = devices.Forget(device_pb2.ForgetDeviceRequest(device_id=new.devices[0].id))
    assert (await refusal(connected)).reason == "DEVICE_CONNECTED"
    await leave(new)
    for device in new.devices:
        await devices.Forget(device_pb2.ForgetDeviceRequest(device_id=device.id))
    listed = await devices.List(device_pb2.ListDevicesRequest())
    assert not {device.id for device in listed.devices} & {device.id for device in new.devices}


@pytest.mark.parametrize(
    ("executed", "words"),
    [("", "RESULT"), ("further", "3 further samples, and 0 were sent"), ("calls", "3 calls, and 0 were sent")],
)
async def test_a_forged_measurement_is_a_device_fault_and_never_valid(
    channels: dict[str, grpc.aio.Channel], executed: str, words: str
) -> None:
    forged = await FarmCalls(channels["thief"]).put(array("q", [1] * 1000).tobytes())
    thief = await welcomed(channels["thief"], f"forger-{executed}")
    result = agent_pb2.CandidateResult(
        threads=1, iterations=1000, duration_ns=1_000_000_000, stop_reason=common_pb2.STOP_REASON_ENOUGH, samples=forged,
        outputs=forged,
    )  # fmt: skip
    if executed:
        getattr(result, executed).samples = 3
    job = await answered(channels["ann"], thief, result, measurement=job_pb2.Measurement(iterations=1000))
    assert job.state == job_pb2.JOB_STATE_FAILED
    (cell,) = job.cells
    assert (cell.error.reason, cell.error.fault) == ("RESULT_IMPLAUSIBLE", common_pb2.FAULT_DEVICE)
    assert words in f"{cell.error.reason} {cell.error.message}"
    assert [attempt.error.reason for attempt in cell.attempts] == ["RESULT_IMPLAUSIBLE"] * 3
    await leave(thief)


async def enrolled(root: grpc.aio.Channel, server: str, principal: str, agent_id: str) -> str:
    """Return the token of an agent that enrolled but has not connected yet."""
    created = await token_pb2_grpc.TokenServiceStub(root).Create(
        token_pb2.CreateTokenRequest(principal=principal, role=common_pb2.ROLE_AGENT, enrolment=True)
    )
    async with open_channel(Access(server, created.secret)) as channel:
        answer = await agent_pb2_grpc.AgentServiceStub(channel).Enroll(
            agent_pb2.EnrollAgentRequest(protocol_version=PROTOCOL_VERSION, agent_id=agent_id)
        )
    return answer.token


async def test_an_enrolled_identity_cannot_be_taken_before_its_agent_connects(
    server: str, channels: dict[str, grpc.aio.Channel]
) -> None:
    token = await enrolled(channels["root"], server, "board-8", "enrolled")
    assert await ending(Agent(channels["thief"], "enrolled")) == "AGENT_NOT_YOURS"
    async with open_channel(Access(server, token)) as channel:
        board = await welcomed(channel, "enrolled")
        await leave(board)


async def test_a_restricted_device_stays_restricted_under_a_new_id(server: str, channels: dict[str, grpc.aio.Channel]) -> None:
    root = channels["root"]
    await project_pb2_grpc.ProjectServiceStub(root).Create(project_pb2.CreateProjectRequest(name="cage"))
    devices = device_pb2_grpc.DeviceServiceStub(root)
    async with open_channel(Access(server, await enrolled(root, server, "caged", "caged"))) as channel:
        caged = await welcomed(channel, "caged")
        for device in caged.devices:
            await devices.Restrict(device_pb2.RestrictDeviceRequest(device_id=device.id, projects=["cage"]))
        alias = device_pb2.Device(id="alias-of-caged", name="free", arch="x86_64", cores=2)
        caged.outgoing.put_nowait(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=alias)))
        await caged.has_read_all()
        assert list((await devices.Get(device_pb2.GetDeviceRequest(device_id=alias.id))).projects) == ["cage"]
        await leave(caged)
        # By a Hello, and over a restriction that an admin lifts.
        await devices.Restrict(device_pb2.RestrictDeviceRequest(device_id=alias.id, projects=[]))
        second = device_pb2.Device(id="second-of-caged", name="second", arch="x86_64", cores=2)
        uncaged = await welcomed(channel, "caged", devices=[second])
        assert not (await devices.Get(device_pb2.GetDeviceRequest(device_id=second.id))).projects, "as its free device"
        await leave(uncaged)


async def test_a_sessions_answers_do_not_delete_uploads_of_others(channels: dict[str, grpc.aio.Channel]) -> None:
    ann = FarmCalls(channels["ann"])
    pte, victim = [await ann.put(each) for each in (program("add").bytes, b"uploaded for a job that is submitted next")]
    thief = await welcomed(channels["thief"], "deleter")
    caller = Caller(channels["ann"], session_on(thief, pte))
    serving = thief.serve(await thief.started())
    await caller.event("ready")
    answer = caller.call("x")
    serving.answer((await serving.call()).call_id, 1, session_pb2.SessionTensors(artifact=victim))
    await answer
    serving.end()
    await caller.event("ended")
    async with asyncio.timeout(WAIT_S):
        assert await caller.events.read() is grpc.aio.EOF
    missing = await ann.artifacts.FindMissing(artifact_pb2.FindMissingArtifactsRequest(digests=[victim.digest]))
    assert not missing.missing
    await leave(thief)


async def downloads(channel: grpc.aio.Channel, wanted: str) -> str:
    """Return the reason for which an artifact cannot be downloaded; empty if it can."""
    try:
        async for _ in artifact_pb2_grpc.ArtifactServiceStub(channel).Download(
            artifact_pb2.DownloadArtifactRequest(digest=wanted)
        ):
            pass
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
        return from_rpc_error(error, server="here").reason
    return ""


@pytest.mark.remedy("ARTIFACT_NOT_OF_ATTEMPT")
async def test_an_agent_can_only_download_its_attempts_artifacts(channels: dict[str, grpc.aio.Channel]) -> None:
    ann, absent = FarmCalls(channels["ann"]), "ARTIFACT_NOT_OF_ATTEMPT"
    candidate, private = await ann.program(program("conv").bytes, "conv"), await ann.put(b"a model that no device has asked for")
    pte = candidate.program.pte.digest
    board = await welcomed(channels["rack"], "reader")
    assert await downloads(channels["rack"], pte) == absent, "before the attempt"
    devices = [job_pb2.DeviceChoice(selector=f"id={board.devices[0].id}")]
    job = await ann.submit(job_pb2.JobSpec(candidates=[candidate], devices=devices))
    start = await board.started()
    assert start.candidates[0].program.pte.digest == pte
    assert await downloads(channels["rack"], pte) == ""
    assert await downloads(channels["rack"], start.candidates[0].bundle.artifact.digest) == ""
    assert await downloads(channels["rack"], private.digest) == absent
    assert await downloads(channels["thief"], pte) == absent, "another agent's attempt"
    board.ended(start, "PROGRAM_FAILED", common_pb2.FAULT_USER)
    async with asyncio.timeout(WAIT_S):
        (*_, last) = await ann.watch(job.id)
        while not (message := await board.stream.read()).HasField("ack"):
            pass
    assert (last.job_state, message.ack.attempt_id) == (job_pb2.JOB_STATE_FAILED, start.attempt_id)
    assert await downloads(channels["rack"], pte) == absent, "after the attempt"
    await leave(board)


async def test_a_device_named_like_an_architecture_does_not_capture_its_jobs(
    channels: dict[str, grpc.aio.Channel],
) -> None:
    # The first by name, with a runner of its own that can do nothing.
    lacking = device_pb2.DeviceRunner(kind=common_pb2.RUNNER_KIND_OWN, backends=["None"], operators=["none"])
    captor = device_pb2.Device(id=platform.machine(), name=" ", arch="none", cores=7, own_runners=[lacking])
    impostor = await welcomed(channels["thief"], "impostor", devices=[captor])
    board = await welcomed(channels["rack"], "honest")
    honest = device_pb2.Device(id="honest-of-7", name="honest-of-7", arch=platform.machine(), cores=7)
    board.outgoing.put_nowait(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=honest)))
    await board.has_read_all()
    ann = FarmCalls(channels["ann"])
    candidates = [await ann.program(program("conv").bytes, "conv")]
    job = await ann.submit(job_pb2.JobSpec(candidates=candidates, devices=[job_pb2.DeviceChoice(selector="cores=7")]))
    started, ending = asyncio.ensure_future(board.started()), asyncio.ensure_future(ann.watch(job.id))
    await asyncio.wait({started, ending}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    assert started.done(), (await ann.jobs.Get(job_pb2.GetJobRequest(job_id=job.id))).cells[0].error
    assert started.result().device_id == honest.id
    board.ended(started.result(), "PROGRAM_FAILED", common_pb2.FAULT_USER)
    await ending
    await leave(impostor)
    await leave(board)
