"""Callers that do not read what they asked for, against a real server: its memory, and what others notice."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import grpc
import pytest
from google.protobuf.message import Message

from etfarm.server.rpc.door.calls import MAX_UNREAD
from etfarm.v1 import agent_pb2, job_pb2, job_pb2_grpc
from etfarm.wire.channel import Access, open_channel
from tests.support import http2
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.door import Door
from tests.support.door import new_door as new_door
from tests.support.farm_calls import FarmCalls, open_channels
from tests.support.http2 import Http2
from tests.support.programs import program
from tests.support.simulated_agent import SELECTOR, Act, SimulatedAgent

pytestmark = pytest.mark.slow(reason="hundreds of calls wait for a caller who does not read")

WAIT_S = 120.0
TOKENS = {name: f"{name}-token-of-24-characters" for name in ("ann", "bob", "sim")}
ROLES = {"ann": "user", "bob": "user", "sim": "agent"}
MIB = 1 << 20
LOG_LINES, LINE_CHARACTERS = 4_000, 8_000
JOBS = 100
WINDOW_BYTES = 4
SETTING_OF_WINDOW = 4


class SilentCaller(Http2):
    """One connection with many calls, of whose responses it reads next to nothing: each may send four bytes."""

    def __init__(self, address: str, token: str, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._headers: Mapping[str, str] = {"authorization": f"Bearer {token}"}
        self._calls = 0
        self.answered: set[int] = set()
        """Streams of the calls whose responses have begun to arrive."""

    def begin(self) -> None:
        """Send the preface and settings, and take the server's."""
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(http2.SETTINGS, 0, 0, struct.pack(">HI", SETTING_OF_WINDOW, WINDOW_BYTES))
        while self._frame()[0] != http2.SETTINGS:
            pass

    def ask(self, rpc: str, request: Message) -> None:
        """Begin a call with a small request, and do not wait for its response."""
        stream, data = 2 * self._calls + 1, request.SerializeToString()
        self._calls += 1
        self._send(http2.HEADERS, http2.END_HEADERS, stream, http2.fields(f"/etfarm.v1.{rpc}", self._headers))
        self._send(http2.DATA, http2.END_STREAM, stream, struct.pack(">BI", 0, len(data)) + data)

    def until_answered(self, calls: int) -> None:
        """Wait until so many calls have begun to be answered."""
        while len(self.answered) < calls:
            self._frame()

    def _frame(self) -> tuple[int, int, int, bytes]:
        kind, flags, stream, payload = super()._frame()
        if kind == http2.DATA and payload:
            self.answered.add(stream)
        return kind, flags, stream, payload


@pytest.fixture(scope="module")
def served(new_door: Callable[..., AbstractContextManager[Door]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A server with two users."""
    lines = [f"{name} {ROLES[name]} {token}" for name, token in TOKENS.items()]
    with new_door(tmp_path_factory.mktemp("unread"), lines=lines) as door:
        yield door


@pytest.fixture
async def channels(served: Door) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    async with SimulatedAgent(served.address, "sim", token=TOKENS["sim"]):
        pass  # jobs wait for devices that the farm has seen
    async with open_channels(served.address, TOKENS) as opened:
        yield opened


async def submit(calls: FarmCalls, labels: dict[str, str] | None = None) -> job_pb2.Job:
    candidate = await calls.program(program("add").path.read_bytes(), "add")
    spec = job_pb2.JobSpec(candidates=[candidate], devices=[job_pb2.DeviceChoice(selector=SELECTOR)], labels=labels)
    return await calls.submit(spec)


async def fill_page(calls: FarmCalls, jobs: int) -> job_pb2.ListJobsRequest:
    """Return a request for a page of so many large jobs."""
    page = job_pb2.ListJobsRequest(page_size=jobs)
    labels = {f"{number:02}" + "k" * 98: "v" * 200 for number in range(64)}
    for _ in range(jobs - len((await calls.jobs.List(page)).jobs)):  # one after the other, as a page has them all
        await submit(calls, labels)
    return page


async def fill_log(agent: SimulatedAgent, calls: FarmCalls, job_id: str) -> None:
    """Make the job's run print 32 MB, and wait until the server has written them."""
    await agent.until(lambda: bool(agent.active))
    (attempt,) = agent.active
    for _ in range(4):
        lines = ["x" * LINE_CHARACTERS] * (LOG_LINES // 4)
        progress = agent_pb2.RunProgress(attempt_id=attempt, device_id="id-of-sim", phase="TIMED", log_lines=lines)
        agent.report(progress)
    async with asyncio.timeout(WAIT_S):
        while True:
            tail = calls.jobs.TailLog(job_pb2.TailJobLogRequest(job_id=job_id))
            if sum([1 async for _ in tail]) >= LOG_LINES:
                return
            await asyncio.sleep(0.2)


async def test_readers_of_a_long_log_who_do_not_read_cost_little_and_delay_nobody(
    served: Door, channels: dict[str, grpc.aio.Channel]
) -> None:
    ann, bob = FarmCalls(channels["ann"]), FarmCalls(channels["bob"])
    async with SimulatedAgent(served.address, "sim", act=lambda _: Act.HANG, token=TOKENS["sim"]) as agent:
        job = await submit(ann)
        await fill_log(agent, ann, job.id)
        before = served.memory("VmRSS")
        callers = [SilentCaller(served.address, TOKENS["ann"], timeout_s=WAIT_S) for _ in range(2)]
        try:
            for caller in callers:
                caller.begin()
                for _ in range(150):
                    caller.ask("JobService/TailLog", job_pb2.TailJobLogRequest(job_id=job.id, follow=True))
                await asyncio.to_thread(caller.until_answered, 150)
            # Each held a page of 4 MB, 1.2 GB in all.
            assert served.memory("VmRSS") - before < 200 * MIB
            watch = bob.jobs.Watch(job_pb2.WatchJobRequest(job_id=job.id))
            agent.report(agent_pb2.RunProgress(attempt_id=agent.active[0], device_id="id-of-sim", phase="LAST", message="here"))
            async with asyncio.timeout(10.0):
                async for event in watch:
                    if event.progress.message == "here":
                        break
            watch.cancel()
        finally:
            for caller in callers:
                caller.socket.close()
        await ann.jobs.Cancel(job_pb2.CancelJobRequest(job_id=job.id), timeout=WAIT_S)


async def test_answers_that_nobody_reads_are_bounded_for_each_principal_and_delay_no_other(
    served: Door, channels: dict[str, grpc.aio.Channel]
) -> None:
    ann, bob = FarmCalls(channels["ann"]), FarmCalls(channels["bob"])
    page = await fill_page(ann, JOBS)
    assert (await ann.jobs.List(page)).ByteSize() > 1.5 * MIB
    before = served.memory("VmRSS")
    caller = SilentCaller(served.address, TOKENS["ann"], timeout_s=WAIT_S)
    with caller:
        caller.begin()
        for _ in range(200):
            caller.ask("JobService/List", page)
        await asyncio.to_thread(caller.until_answered, MAX_UNREAD)
        async with asyncio.timeout(10.0):
            assert len((await bob.jobs.List(page)).jobs) == JOBS
            await ann.online()
        # Two hundred answers took 0.7 GB.
        assert served.memory("VmRSS") - before < 250 * MIB
    async with asyncio.timeout(WAIT_S):
        assert len((await ann.jobs.List(page)).jobs) == JOBS


async def test_a_caller_is_answered_beside_its_own_that_do_not_read(served: Door, channels: dict[str, grpc.aio.Channel]) -> None:
    bob = FarmCalls(channels["bob"])
    page = await fill_page(bob, 10)
    assert (await bob.jobs.List(page)).ByteSize() > 100 << 10
    with SilentCaller(served.address, TOKENS["bob"], timeout_s=WAIT_S) as caller:
        caller.begin()
        for _ in range(40):
            caller.ask("JobService/List", page)
        await asyncio.to_thread(caller.until_answered, MAX_UNREAD)
        async with asyncio.timeout(WAIT_S):
            assert len((await bob.jobs.List(page)).jobs) == 10
        await asyncio.to_thread(caller.until_closed)
        assert len(caller.answered) == MAX_UNREAD


async def test_watchers_who_do_not_read_are_disconnected_beyond_the_limit_and_others_stay(
    served: Door, channels: dict[str, grpc.aio.Channel]
) -> None:
    async with open_channel(Access(served.address, token=TOKENS["ann"])) as channel:
        reading = job_pb2_grpc.JobServiceStub(channel).WatchAll(job_pb2.WatchAllJobsRequest())
        with SilentCaller(served.address, TOKENS["ann"], timeout_s=WAIT_S) as caller:
            caller.begin()
            for _ in range(50):
                caller.ask("JobService/WatchAll", job_pb2.WatchAllJobsRequest())
            async with asyncio.timeout(WAIT_S):
                await asyncio.to_thread(caller.until_closed)
        job = await submit(FarmCalls(channels["ann"]))
        async with asyncio.timeout(WAIT_S):
            async for change in reading:
                if change.job_id == job.id:
                    break
