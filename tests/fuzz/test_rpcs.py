"""Every rpc of the contract with random and extreme messages, against a real server process.

Each is answered, and never with INTERNAL or UNKNOWN; no handler fails by a bug; the server stays alive, answers others meanwhile
and takes no more memory. What was stored on the way breaks no list.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import grpc
import psutil
import pytest

from etfarm.v1 import agent_pb2, agent_pb2_grpc, artifact_pb2, common_pb2, device_pb2, farm_pb2, farm_pb2_grpc, session_pb2
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.names import PROTOCOL_VERSION
from tests.fuzz import engine, messages
from tests.support.contract import ENDLESS, RPCS, address_of
from tests.support.farm import serve

pytestmark = pytest.mark.slow(reason="sends thousands of messages to a server")

RUNS: Final = int(os.environ.get("ETFARM_FUZZ_RPCS", "8"))
"""Messages of each rpc; more by hand."""
SEED: Final = int(os.environ.get("ETFARM_FUZZ_SEED", "20261122"))
WAIT_S: Final = 200.0
STREAM_S: Final = 1.0
"""After which a stream that waits for more is left: it was not refused, and needs no answer."""
MEMORY_BYTES: Final = 400 << 20
"""What a server may take beyond what it had: its caches of SQLite, of gRPC and of imported modules are in it."""
BUGS: Final = ("failed because of a bug", "could not be handled", "never retrieved")
CUT_SHORT: Final = "Internal error from Core"
"""What a grpc.aio client says of a stream that the server ended while a message was on its way."""


class Served:
    """A server, and what it was like before."""

    def __init__(self, folder: Path) -> None:
        self.daemon = serve(folder, executes=True)
        self.log = self.daemon.log
        self.daemon.start()
        self.address = address_of(self.daemon)
        self.before_bytes = 0

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.daemon.pid).memory_info().rss)

    def bugs(self) -> list[str]:
        """Return the lines of its log that report a bug."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if any(word in line for word in BUGS)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    created = Served(tmp_path_factory.mktemp("rpcs"))
    try:
        asyncio.run(_is_alive(created.address))
        created.before_bytes = created.memory_bytes()
        yield created
    finally:
        assert created.daemon.stop() == 0


async def _is_alive(address: str) -> None:
    async with open_channel(Access(address)) as channel:
        info = await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest(), timeout=WAIT_S)
    assert info.version


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    """A channel, while the device `d1` is connected and the artifact of no bytes is stored: some messages name these."""
    known = len(served.bugs())
    async with open_channel(Access(served.address)) as opened:
        header = artifact_pb2.UploadHeader(artifact=common_pb2.Artifact(digest=messages.STORED))
        await send(opened, "ArtifactService.Upload", artifact_pb2.UploadArtifactRequest(header=header).SerializeToString())
        agent = agent_pb2_grpc.AgentServiceStub(opened).Connect()
        await agent.write(_hello(agent_id="00000000-1111-2222-3333-444444444444", devices=[_DEVICE]))
        assert (await agent.read()).HasField("welcome")
        yield opened
        agent.cancel()
    await _is_alive(served.address)
    assert not served.bugs()[known:]
    assert served.memory_bytes() - served.before_bytes < MEMORY_BYTES


async def send(channel: grpc.aio.Channel, rpc: str, *requests: bytes) -> tuple[str, str]:
    """Send raw requests, and return the status's code and its details; what the answers hold does not matter here."""
    method = RPCS[rpc]
    kind = ("stream" if method.client_streaming else "unary") + "_" + ("stream" if method.server_streaming else "unary")
    stub = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    is_stream = method.client_streaming or method.server_streaming

    async def stream() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    running = stub(stream() if method.client_streaming else requests[0], timeout=STREAM_S if is_stream else WAIT_S)
    try:
        if method.server_streaming:
            async for _ in running:
                if rpc in ENDLESS:
                    break
        else:
            await running
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def assert_answered(rpc: str, answer: tuple[str, str], requests: list[bytes]) -> None:
    code, details = answer
    if code in ("INTERNAL", "UNKNOWN") and details.startswith(CUT_SHORT):
        return
    shown = " ".join(request[:2000].hex() for request in requests[:4])
    assert code not in ("INTERNAL", "UNKNOWN"), f"{rpc}: {code}: {details}; requests {shown}"
    assert code != "DEADLINE_EXCEEDED" or RPCS[rpc].client_streaming or RPCS[rpc].server_streaming, f"{rpc}: {shown}"


@pytest.mark.parametrize("rpc", sorted(RPCS))
async def test_an_rpc_answers_random_messages(rpc: str, channel: grpc.aio.Channel) -> None:
    chance, method = random.Random(f"{SEED} {rpc}"), RPCS[rpc]
    calls: list[list[bytes]] = []
    for _ in range(RUNS):
        count = chance.choice((1, 2, 4)) if method.client_streaming else 1
        calls.append([messages.make(method.input_type, chance).SerializeToString() for _ in range(count)])
    seeds = [request for requests in calls for request in requests if request][:20] or [b"\x0a\x01x"]
    reader = engine.Reader(rpc, lambda _: None, seeds, most_bytes=1 << 14)
    damaged = engine.mutated(reader, SEED)
    calls += [[next(damaged)] for _ in range(RUNS // 2)] + [[b""], [b"\xff" * 64]]
    answers = await asyncio.gather(*(send(channel, rpc, *requests) for requests in calls))
    for requests, answer in zip(calls, answers, strict=True):
        assert_answered(rpc, answer, requests)


def _hello(**more: object) -> agent_pb2.AgentMessage:
    text = {"agent_id": "11111111-2222-3333-4444-555555555555", "protocol_version": PROTOCOL_VERSION} | more
    return agent_pb2.AgentMessage(hello=agent_pb2.Hello(**text))  # type: ignore[arg-type]


_DEVICE = device_pb2.Device(id="d1", name="d1", arch="x86_64", cores=1)
_OTHER = device_pb2.Device(id="d2", name="d2", arch="x86_64", cores=1)
_HEADER = artifact_pb2.UploadArtifactRequest(
    header=artifact_pb2.UploadHeader(artifact=common_pb2.Artifact(digest="a" * 64, size_bytes=3))
)
_CHUNK = artifact_pb2.UploadArtifactRequest(chunk=artifact_pb2.Chunk(offset=0, data=b"abc"))
_ODD_SIZES = [
    artifact_pb2.UploadArtifactRequest(
        header=artifact_pb2.UploadHeader(artifact=common_pb2.Artifact(digest="b" * 64, size_bytes=size))
    )
    for size in (-1, 0, (1 << 63) - 1)
]
_RESULT = agent_pb2.AgentMessage(run_result=agent_pb2.RunResult(attempt_id="nobodys", device_id="d1"))
_OUT_OF_ORDER: Final = {
    "chunk first": ("ArtifactService.Upload", [_CHUNK, _HEADER]),
    "two headers": ("ArtifactService.Upload", [_HEADER, _HEADER, _CHUNK]),
    "header alone": ("ArtifactService.Upload", [_HEADER]),
    "nothing": ("ArtifactService.Upload", []),
    "empty request": ("ArtifactService.Upload", [artifact_pb2.UploadArtifactRequest(), _CHUNK]),
    "a chunk behind its place": (
        "ArtifactService.Upload",
        [_HEADER, artifact_pb2.UploadArtifactRequest(chunk=artifact_pb2.Chunk(offset=1 << 62, data=b"x"))],
    ),
    "more than announced": ("ArtifactService.Upload", [_HEADER, _CHUNK, _CHUNK]),
    "a size below 0": ("ArtifactService.Upload", [_ODD_SIZES[0], _CHUNK]),
    "a size of 0": ("ArtifactService.Upload", [_ODD_SIZES[1]]),
    "the largest size": ("ArtifactService.Upload", [_ODD_SIZES[2], _CHUNK]),
    "no hello": ("AgentService.Connect", [_RESULT]),
    "nothing at all": ("AgentService.Connect", []),
    "two hellos": ("AgentService.Connect", [_hello(devices=[_OTHER]), _hello(devices=[_OTHER])]),
    "a hello without devices": ("AgentService.Connect", [_hello(), agent_pb2.AgentMessage()]),
    "a hello without an id": ("AgentService.Connect", [_hello(agent_id="")]),
    "devices without ids": ("AgentService.Connect", [_hello(devices=[device_pb2.Device(), device_pb2.Device()])]),
    "results of unknown attempts": (
        "AgentService.Connect", [_hello(devices=[_OTHER], unacknowledged_attempts=["a", "a", ""]), _RESULT, _RESULT]
    ),
    "progress of unknown attempts": (
        "AgentService.Connect",
        [_hello(devices=[_OTHER]), agent_pb2.AgentMessage(run_progress=agent_pb2.RunProgress(attempt_id="x", device_id="d2"))],
    ),
    "a device that is not there goes": (
        "AgentService.Connect",
        [_hello(devices=[_OTHER]), agent_pb2.AgentMessage(device_gone=agent_pb2.DeviceGone(device_id="other"))],
    ),
    "an update without a device": (
        "AgentService.Connect", [_hello(devices=[_OTHER]), agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate())]
    ),
    "answers of no session": (
        "AgentService.ServeSession",
        [
            agent_pb2.SessionReply(attempt_id="x", answered=agent_pb2.SessionAnswered(call_id="c")),
            agent_pb2.SessionReply(attempt_id="x", log_line="\x1b[2J"),
            agent_pb2.SessionReply(),
        ],
    ),
    "ready twice": ("AgentService.ServeSession", [agent_pb2.SessionReply(attempt_id="x", ready=session_pb2.SessionReady())] * 2),
    "no reply": ("AgentService.ServeSession", []),
    "a call of no session": ("SessionService.Call", [session_pb2.CallSessionRequest(session_id="x", call_id="c")]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(_OUT_OF_ORDER))
async def test_messages_out_of_order_are_refused_or_ignored(name: str, channel: grpc.aio.Channel) -> None:
    rpc, requests = _OUT_OF_ORDER[name]
    sent = [request.SerializeToString() for request in requests]
    assert_answered(rpc, await send(channel, rpc, *sent), sent)


async def test_lists_work_after_random_messages(channel: grpc.aio.Channel) -> None:
    for rpc in sorted(RPCS):
        if rpc.partition(".")[2].startswith("List"):
            code, details = await send(channel, rpc, b"")
            assert code in ("OK", "NOT_FOUND"), f"{rpc}: {code}: {details}"
