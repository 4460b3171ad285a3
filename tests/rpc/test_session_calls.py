"""SessionService and AgentService.ServeSession of a real server, with an agent that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from etfarm.client import Farm
from etfarm.server.sessions.session import MAX_CALLS
from etfarm.v1 import (
    agent_pb2,
    common_pb2,
    compile_pb2,
    job_pb2,
    job_pb2_grpc,
    session_pb2,
)
from etfarm.wire import digest
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support.farm import serve
from tests.support.farm_calls import FarmCalls
from tests.support.programs import program
from tests.support.refusals import refusal
from tests.support.runner import runner_archive
from tests.support.session_ends import WAIT_S, Agent, Caller, Serving, session_on, welcomed

pytestmark = pytest.mark.slow(reason="waits for the deadlines of calls on a real agent")

SOON_S = 0.3
"""After which what has not come is not on its way."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sessions")
    with serve(folder) as daemon:
        address = daemon.expect("listening on").rpartition(" ")[2]
        with Farm(address) as farm:
            farm.add_bundle(runner_archive())
        yield address


@pytest.fixture
async def channel(server: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(Access(server)) as channel:
        yield channel


@pytest.fixture
async def agent(channel: grpc.aio.Channel, request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    agent = await welcomed(channel, f"a{abs(hash(request.node.name)) % 10**6}")
    yield agent
    agent.stream.cancel()


@pytest.fixture
async def wanted(channel: grpc.aio.Channel, agent: Agent) -> session_pb2.OpenSessionRequest:
    """Return a request for a session on the agent's first device."""
    return session_on(agent, await FarmCalls(channel).put(program("add").bytes))


@pytest.fixture
async def ready(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> AsyncIterator[tuple[Caller, Serving]]:
    """The two ends of a session that takes calls: its owner's and its device's."""
    caller = Caller(channel, wanted)
    serving = agent.serve(await agent.started())
    await caller.event("ready")
    yield caller, serving
    caller.events.cancel()


async def test_calls_are_sent_to_the_device_in_sequence_and_answered_by_id(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    caller = Caller(channel, wanted)
    start = await agent.started()
    assert (start.device_id, start.HasField("session"), len(start.candidates)) == (agent.devices[0].id, True, 1)
    serving = agent.serve(start)
    ready = (await caller.event("ready")).ready
    assert (ready.threads, ready.device.name) == (2, agent.devices[0].name)
    first, second = caller.call("x"), caller.call("y")
    sent = await serving.call()
    serving.line("said by the runner")
    assert (await caller.event("log_line")).log_line == "said by the runner"
    serving.answer("of nobody", 1)
    serving.answer(sent.call_id, 10)
    other = await serving.call()
    assert {sent.call_id, other.call_id} == {"x", "y"}
    serving.answer(other.call_id, 20)
    answers = {answer.call_id: answer.answer.run_ns for answer in (await first, await second)}
    assert answers == {sent.call_id: 10, other.call_id: 20}
    caller.events.cancel()


@pytest.mark.remedy("SESSION_NOT_READY", "CALL_KNOWN")
async def test_an_invalid_call_is_refused_by_name(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    caller = Caller(channel, wanted)
    start = await agent.started()
    await caller.event("waiting")
    assert (await refusal(caller.call("x"))).reason == "SESSION_NOT_READY"
    serving = agent.serve(start)
    await caller.event("ready")
    under_way = caller.call("x")
    await serving.call()
    assert (await refusal(caller.call("x"))).reason == "CALL_KNOWN"
    large = session_pb2.SessionTensors(inline=b"\0" * ((1 << 20) + 1))
    assert (await refusal(caller.call("y", inputs=large))).reason == "BAD_CALL"
    absent = session_pb2.SessionTensors(artifact=artifact_of(b"this was never uploaded"))
    assert (await refusal(caller.call("y", inputs=absent))).reason == "ARTIFACT_MISSING"
    serving.answer("x", 1)
    await under_way
    own = caller.call("y")  # with an id of its own
    serving.answer((await serving.call()).call_id, 2)
    assert (await own).answer.run_ns == 2
    caller.id = "somebody else's"
    assert (await refusal(caller.call("y"))).reason == "SESSION_NOT_FOUND"
    caller.events.cancel()


@pytest.mark.remedy("TOO_MANY_CALLS")
async def test_calls_beyond_a_sessions_queue_are_refused_and_the_others_answered(ready: tuple[Caller, Serving]) -> None:
    caller, serving = ready
    calls = [caller.call(str(number)) for number in range(MAX_CALLS + 1)]
    done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    (refused,) = done
    assert (await refusal(refused)).reason == "TOO_MANY_CALLS"
    for number in range(MAX_CALLS):
        serving.answer((await serving.call()).call_id, number)
    assert sorted([(await call).answer.run_ns for call in waiting]) == list(range(MAX_CALLS))
    again = caller.call("again")
    serving.answer((await serving.call()).call_id, 7)
    assert (await again).answer.run_ns == 7


@pytest.mark.remedy("BAD_ANSWER")
async def test_an_answer_with_too_much_inline_does_not_reach_the_owner(ready: tuple[Caller, Serving]) -> None:
    caller, serving = ready
    for size, reason in (((1 << 20) + 1, "BAD_ANSWER"), (1 << 20, "")):
        under_way = caller.call("x")
        await serving.call()
        serving.answer("x", 1, session_pb2.SessionTensors(inline=b"\0" * size))
        answer = (await under_way).answer
        assert (answer.error.reason, len(answer.outputs.inline)) == (reason, 0 if reason else size)


@pytest.mark.remedy("BAD_SESSION")
async def test_an_impossible_session_is_refused_before_its_first_event(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    def other(**fields: object) -> session_pb2.OpenSessionRequest:
        request = session_pb2.OpenSessionRequest()
        request.CopyFrom(wanted)
        request.MergeFrom(session_pb2.OpenSessionRequest(**fields))  # type: ignore[arg-type]
        return request

    absent = artifact_of(b"this was never uploaded")
    reasons = {
        "METHOD_MISSING": other(methods=["backward"]),
        "UNKNOWN_SELECTOR_KEY": other(selector="colour=red"),
        "NO_SUCH_DEVICE": other(selector="id=none"),
        "BAD_SESSION": other(program=compile_pb2.Program(digest="0" * 64)),
        "ARTIFACT_MISSING": session_pb2.OpenSessionRequest(
            program=compile_pb2.Program(pte=absent, digest=digest.of_program(absent.digest, {}))
        ),
    }
    got = {reason: (await refusal(Caller(channel, request).events.read())).reason for reason, request in reasons.items()}
    assert got == {reason: reason for reason in reasons}
    caller = Caller(channel, wanted)
    agent.serve(await agent.started())
    await caller.event("ready")
    caller.events.cancel()


async def test_a_device_fault_before_ready_replaces_the_session_at_most_twice(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    caller = Caller(channel, wanted)
    attempts = set()
    for _ in range(3):
        start = await agent.started()
        attempts.add(start.attempt_id)
        agent.ended(start, "DEVICE_DISK_FULL", common_pb2.FAULT_DEVICE)
    assert (await caller.event("ended")).ended.reason == "DEVICE_DISK_FULL"
    assert len(attempts) == 3
    assert await caller.events.read() is grpc.aio.EOF


async def test_a_program_fault_ends_the_session_at_once(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    caller = Caller(channel, wanted)
    agent.ended(await agent.started(), "PROGRAM_FAILED", common_pb2.FAULT_USER)
    assert (await caller.event("ended")).ended.reason == "PROGRAM_FAILED"


async def test_a_waiting_call_gets_the_reason_of_a_device_that_stops_serving(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    caller = Caller(channel, wanted)
    start = await agent.started()
    serving = agent.serve(start)
    await caller.event("ready")
    waiting = caller.call("x")
    await serving.call()
    serving.end()
    agent.ended(start, "PROGRAM_OUT_OF_MEMORY", common_pb2.FAULT_USER)
    assert (await waiting).answer.error.reason == "PROGRAM_OUT_OF_MEMORY"
    assert (await caller.event("ended")).ended.reason == "PROGRAM_OUT_OF_MEMORY"


@pytest.mark.remedy("SESSION_LOST")
async def test_a_stream_that_ends_without_a_reason_loses_the_session(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest, ready: tuple[Caller, Serving]
) -> None:
    caller, serving = ready
    serving.stream.cancel()
    ended = (await caller.event("ended")).ended
    assert (ended.fault, ended.reason) == (common_pb2.FAULT_DEVICE, "SESSION_LOST")
    again = Caller(channel, wanted)
    agent.serve(await agent.started())
    await again.event("ready")
    again.events.cancel()


@pytest.mark.remedy("NO_READY", "SESSION_SERVED", "SESSION_NOT_FOUND")
async def test_a_stream_for_an_unknown_session_is_refused(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest
) -> None:
    unready = Serving(agent.stub, "x", ready=False)
    unready.line("first")
    assert (await refusal(unready.stream.read())).reason == "NO_READY"
    assert (await refusal(Serving(agent.stub, "nobody's").stream.read())).reason == "SESSION_NOT_FOUND"
    caller = Caller(channel, wanted)
    start = await agent.started()
    serving = agent.serve(start)
    await caller.event("ready")
    assert (await refusal(agent.serve(start).stream.read())).reason == "SESSION_SERVED"
    waiting = caller.call("x")
    serving.answer((await serving.call()).call_id, 1)
    assert (await waiting).answer.run_ns == 1, "the first one serves on"
    caller.events.cancel()


async def test_a_loop_waits_until_the_servers_machine_is_idle(
    channel: grpc.aio.Channel, agent: Agent, wanted: session_pb2.OpenSessionRequest, ready: tuple[Caller, Serving]
) -> None:
    caller, serving = ready
    candidate = job_pb2.Candidate(name="add", program=wanted.program)
    elsewhere = job_pb2.DeviceChoice(selector=f"id={agent.devices[1].id}")
    spec = job_pb2.JobSpec(candidates=[candidate], devices=[elsewhere], measurement=job_pb2.Measurement())
    jobs = job_pb2_grpc.JobServiceStub(channel)
    await jobs.Submit(job_pb2.SubmitJobRequest(protocol_version=PROTOCOL_VERSION, request_id=caller.id, spec=spec))
    measuring = await agent.started()
    assert measuring.HasField("measurement")
    looping = caller.call("loop", loop=session_pb2.SessionLoop(iterations=1))
    coming = asyncio.create_task(serving.call())
    done, _ = await asyncio.wait({coming}, timeout=SOON_S)
    assert not done, "two measure at one time"
    agent.ended(measuring, "PROGRAM_FAILED", common_pb2.FAULT_USER)
    serving.answer((await coming).call_id, 5)
    assert (await looping).answer.run_ns == 5


async def test_a_generation_streams_in_its_turn_and_its_caller_s_leaving_stops_it(ready: tuple[Caller, Serving]) -> None:
    caller, serving = ready
    text = caller.generate("text", 3)
    sent = await serving.call()
    assert (list(sent.task.generation.prompt_tokens), sent.task.timeout_s, sent.cancel) == ([1], 7.0, False)
    serving.tokens("text", 5)
    first = await text.read()
    assert (first.call_id, list(first.tokens.tokens), list(first.tokens.token_ns)) == ("text", [5], [1])
    behind = caller.call("behind")
    text.cancel()
    stop = await serving.call()
    assert (stop.call_id, stop.cancel, stop.HasField("task")) == ("text", True, False)
    serving.tokens("text", 6)
    serving.answer("text", 0)
    assert (await serving.call()).call_id == "behind", "the next one begins when the device has stopped"
    withdrawn = caller.generate("withdrawn", 3)
    await withdrawn.initial_metadata()
    withdrawn.cancel()
    await asyncio.sleep(SOON_S)  # the device's answer must not come before it
    serving.answer("behind", 1)
    assert (await behind).answer.run_ns == 1
    whole = caller.generate("whole", 2)
    assert (await serving.call()).call_id == "whole", "the withdrawn one was not sent"
    serving.tokens("whole", 7)
    serving.tokens("whole", 8)
    serving.answer("whole", 0)
    parts = [part async for part in whole]
    assert [token for part in parts for token in part.tokens.tokens] == [7, 8]
    assert [part.HasField("answer") for part in parts][-1] and sum(part.HasField("answer") for part in parts) == 1
    assert (await refusal(caller.call("x", generation=session_pb2.SessionGeneration(tokens=1)))).reason == "BAD_CALL"


async def test_tokens_that_were_not_requested_end_the_session(ready: tuple[Caller, Serving]) -> None:
    caller, serving = ready
    text = caller.generate("text", 2)
    await serving.call()
    serving.tokens("nobody's", 1, 2, 3)
    serving.tokens("text", 5, 6)
    assert list((await text.read()).tokens.tokens) == [5, 6]
    serving.tokens("text", 7)
    assert (await text.read()).answer.error.reason == "BAD_ANSWER"
    assert (await caller.event("ended")).ended.reason == "BAD_ANSWER"


async def test_an_agent_that_leaves_ends_the_session(agent: Agent, ready: tuple[Caller, Serving]) -> None:
    caller, serving = ready
    agent.outgoing.put_nowait(agent_pb2.AgentMessage(goodbye=agent_pb2.Goodbye(reason="a test")))
    assert (await caller.event("ended")).ended.reason == "SESSION_LOST"
    assert await serving.stream.read() is grpc.aio.EOF


def test_no_device_stays_busy_after_the_sessions_of_this_module(server: str) -> None:
    with Farm(server) as farm:
        assert {device.state.name for device in farm.devices()} == {"OFFLINE"}
