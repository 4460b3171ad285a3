"""Calls that a standby forwards: of each kind, as if the leading server itself had been called."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from etfarm.server.cluster.leadership import Leader, Leadership
from etfarm.server.cluster.links import WAIT_S
from etfarm.server.cluster.standby import standing_by
from etfarm.server.config import Config
from etfarm.server.rpc.door.connections import Connections
from etfarm.server.rpc.door.failures import FREE
from etfarm.server.rpc.door.forwarded import ACCEPTED, KEY, PEER, QUESTION, Forwarded
from etfarm.server.rpc.door.interceptor import AuthErrorInterceptor
from etfarm.server.rpc.door.listening import guarded_server
from etfarm.v1 import agent_pb2, artifact_pb2_grpc, device_pb2, device_pb2_grpc, farm_pb2, farm_pb2_grpc, job_pb2, job_pb2_grpc
from etfarm.wire.channel import Access, open_channel, parse_address
from etfarm.wire.chunks import artifact_of, download_bytes, upload
from etfarm.wire.failover import settle
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.agent_stream import AgentStream
from tests.support.authentications import authentication
from tests.support.contract import address_of
from tests.support.fake_servers import serving
from tests.support.farm import Daemon, private_file, serve
from tests.support.refusals import refusal

DEAD = Leader(1, "127.0.0.1:1", "", "", "")
"""A leader that does not answer."""
TOKEN = "secret-of-ann-0123456789"
SECRET = "the secret of the farm's servers"
WATCH, UPLOAD = "/etfarm.v1.JobService/Watch", "/etfarm.v1.ArtifactService/Upload"
MESSAGE = bytes(1 << 20)
WATCH_DEVICES = device_pb2.WatchDevicesRequest()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("leader")) as daemon:
        yield daemon


@asynccontextmanager
async def standby_of(
    address: str | None, folder: Path, wait_s: float = WAIT_S, tokens: Path | None = None, page_key: str = ""
) -> AsyncIterator[tuple[grpc.aio.Channel, str, Leadership]]:
    """Forward calls to the server at the address; yield a channel to the standby, its address, and who leads."""
    leadership = Leadership(None if address is None else Leader(1, address, "", "", SECRET))
    config = Config(parse_address("127.0.0.1:0"), folder, tokens=tokens)
    async with standing_by(config, leadership, wait_s=wait_s, page_key=page_key) as own, open_channel(Access(own)) as channel:
        yield channel, own, leadership


@pytest.fixture
async def channel(server: Daemon, tmp_path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with standby_of(address_of(server), tmp_path) as (opened, _, _):
        yield opened


async def test_a_single_answer_names_the_server_that_forwarded(server: Daemon, tmp_path: Path) -> None:
    async with standby_of(address_of(server), tmp_path) as (channel, own, _):
        info = await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
        assert (info.forwarded_by, info.principal.name) == (own, "local")


async def test_a_status_keeps_its_details(channel: grpc.aio.Channel) -> None:
    jobs = job_pb2_grpc.JobServiceStub(channel)
    for call in (jobs.Get(job_pb2.GetJobRequest(job_id="x")), jobs.Watch(job_pb2.WatchJobRequest(job_id="x")).read()):
        error = await refusal(call)
        assert (error.reason, error.metadata["job"]) == ("JOB_NOT_FOUND", "x")


async def test_large_files_go_both_ways(channel: grpc.aio.Channel) -> None:
    data = b"".join(hashlib.sha256(bytes([number])).digest() * (1 << 15) for number in range(24))
    artifacts = artifact_pb2_grpc.ArtifactServiceStub(channel)
    await upload(artifacts, artifact_of(data), data)
    assert await download_bytes(artifacts, artifact_of(data)) == data


async def test_an_agent_is_welcomed(channel: grpc.aio.Channel) -> None:
    hello = agent_pb2.Hello(agent_id="agent-forwarded", protocol_version=PROTOCOL_VERSION, agent_version="x", host="h")
    stream = AgentStream(channel, hello)
    assert (await stream.stream.read()).WhichOneof("message") == "welcome"
    stream.close()


@pytest.mark.remedy("NO_LEADER")
async def test_calls_wait_for_a_leader_and_end_with_a_reason(server: Daemon, tmp_path: Path) -> None:
    async with standby_of(None, tmp_path, wait_s=1.0) as (channel, _, leadership):
        stub = farm_pb2_grpc.FarmServiceStub(channel)
        assert (await refusal(stub.GetServerInfo(farm_pb2.GetServerInfoRequest()))).reason == "NO_LEADER"
        waiting = asyncio.ensure_future(stub.GetServerInfo(farm_pb2.GetServerInfoRequest()))
        await asyncio.wait({waiting}, timeout=0.2)
        leadership.set(Leader(1, address_of(server), "", "", SECRET))
        assert (await waiting).version


async def test_calls_that_are_open_when_a_standby_ends_get_a_status_that_asks_to_repeat_them(
    server: Daemon, tmp_path: Path
) -> None:
    """gRPC's server would cancel them, as if their callers had."""
    opened = []
    async with standby_of(address_of(server), tmp_path) as (_, own, _), standby_of(None, tmp_path / "other") as (_, waiting, _):
        for address in (own, waiting):  # one forwards its calls, at the other they wait for a leader
            channel = grpc.aio.insecure_channel(address)
            opened.append((channel, [device_pb2_grpc.DeviceServiceStub(channel).Watch(WATCH_DEVICES) for _ in range(8)]))
        assert all([isinstance(await call.read(), device_pb2.DeviceEvent) for call in opened[0][1]])
    for channel, calls in opened:
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert from_rpc_error(ended.value, server="here").reason == "NO_LEADER"
        await channel.close()


async def test_a_standby_is_no_leader_of_another_standby(tmp_path: Path) -> None:
    async with standby_of(None, tmp_path) as (_, own, _), standby_of(own, tmp_path / "other") as (channel, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
        assert "no longer leads" in (failed.value.details() or "")


async def test_a_channel_to_several_servers_leaves_one_that_knows_no_leader(server: Daemon, tmp_path: Path) -> None:
    """Its port is open: only its health and its answers say that it cannot forward."""
    async with standby_of(None, tmp_path, wait_s=0.5) as (_, cut_off, leadership):
        both = Access(f"{cut_off},{address_of(server)}")
        async with open_channel(both) as channel:
            await settle(channel)
            assert not await forwarded_by(channel)
        async with open_channel(both) as channel:
            with pytest.raises(grpc.aio.AioRpcError):  # the first one, since nothing has chosen
                await forwarded_by(channel)
            async with asyncio.timeout(60):
                while await answer_of(channel) != "":  # noqa: ASYNC110 - it moves after the call
                    await asyncio.sleep(0.05)
        for leader, is_chosen in ((DEAD, False), (Leader(2, address_of(server), "", "", SECRET), True)):
            leadership.set(leader)
            async with asyncio.timeout(60):
                while (await chosen_of(both) == cut_off) is not is_chosen:  # noqa: ASYNC110 - once it has looked for the leader
                    await asyncio.sleep(0.2)
        leadership.doubt()
        async with asyncio.timeout(60):
            while await chosen_of(both) == cut_off:  # noqa: ASYNC110 - after the grace of a lost leader
                await asyncio.sleep(0.2)


async def test_a_fault_of_one_call_leaves_a_channel_with_its_server() -> None:
    """A healthy server says UNAVAILABLE for what only concerns one call, and the other one is down."""
    async with serving(Faulty()) as address, open_channel(Access(f"{address},127.0.0.1:1")) as channel:
        await settle(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(WATCH)(b"")
        for _ in range(20):
            assert await channel.unary_unary(UPLOAD)(b"") == b"done"
            await asyncio.sleep(0.02)


class Faulty(grpc.GenericRpcHandler):
    """A server without health checks, of which one method fails."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a method."""

        async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            if details.method == WATCH:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the session is lost")
            return b"done"

        return grpc.unary_unary_rpc_method_handler(answer) if details.method in (WATCH, UPLOAD) else None


async def chosen_of(servers: Access) -> str | None:
    """Return what `answer_of` does, over a new channel."""
    async with open_channel(servers) as channel:
        await settle(channel)
        return await answer_of(channel)


async def answer_of(channel: grpc.aio.Channel) -> str | None:
    """Return `forwarded_by`; None for a server that cannot forward."""
    try:
        return await forwarded_by(channel)
    except grpc.aio.AioRpcError:
        return None


async def forwarded_by(channel: grpc.aio.Channel) -> str:
    """Return the address of the server that has forwarded a call; empty for the leader's own answer."""
    info = await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
    return info.forwarded_by


def write_tokens(path: Path) -> Path:
    private_file(path, f"ann admin {TOKEN}\n")
    return path


def headers(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


async def test_health_requires_a_token_while_no_leader_is_known(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    async with standby_of(None, tmp_path, wait_s=0.5, tokens=tokens) as (channel, _, leadership):
        check, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        assert (await check(request, metadata=headers(TOKEN))).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for leader in (None, DEAD):
            leadership.set(leader)
            assert (await refusal(check(request))).reason == "UNAUTHENTICATED"
            assert (await refusal(check(request, metadata=headers("guess-0123456789")))).reason == "NO_LEADER"
            await check(request, metadata=headers(TOKEN))


async def test_the_leader_decides_about_callers_whom_the_standby_does_not_know(tmp_path: Path) -> None:
    """The leader has a token file, and the standby has none."""
    tokens = write_tokens(tmp_path / "tokens")
    async with token_leader(tokens) as (address, seen), standby_of(address, tmp_path) as (channel, _, _):
        check, request = health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
        jobs, get = job_pb2_grpc.JobServiceStub(channel), job_pb2.GetJobRequest(job_id="x")
        assert (await refusal(jobs.Get(get))).reason == "UNAUTHENTICATED"  # now the standby knows that tokens are required
        seen.clear()
        for token in ("", "guess-0123456789"):
            assert (await refusal(check(request, metadata=headers(token)))).reason == "UNAUTHENTICATED"
            assert (await refusal(jobs.Get(get, metadata=headers(token)))).reason == "UNAUTHENTICATED"
        assert [name for name, size in seen] == ["Check", "Get"] * 2 and not any(size for _, size in seen)
        seen.clear()
        assert await jobs.Get(get, metadata=headers(TOKEN))
        assert [name for name, _ in seen] == ["Get", "Get"], "the question and the call"
        assert (await check(request, metadata=headers(TOKEN))).status == health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def token_leader(tokens: Path) -> AsyncIterator[tuple[str, list[tuple[str, int]]]]:
    """A leader with the real door; yield its address, and the method and size of each call that it gets."""
    seen: list[tuple[str, int]] = []

    class Jobs(job_pb2_grpc.JobServiceServicer):
        async def Get(self, request: job_pb2.GetJobRequest, context: Any) -> job_pb2.Job:  # type: ignore[override]
            seen[-1] = "Get", request.ByteSize()
            return job_pb2.Job(id=request.job_id)

    class Seen(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
            seen.append((details.method.rpartition("/")[2], 0))
            return await continuation(details)

    interceptor = AuthErrorInterceptor(authentication(tokens.parent, tokens), forwarded=Forwarded(SECRET))
    server = guarded_server(
        [Seen(), interceptor], Connections(lambda: True, time.monotonic), interceptor.has_token, interceptor.is_urgent
    )
    job_pb2_grpc.add_JobServiceServicer_to_server(Jobs(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", seen
    finally:
        await server.stop(None)


async def test_only_the_leaders_word_admits_an_unknown_caller(tmp_path: Path) -> None:
    """A leader whose door is not etfarm's answers every call, without the word."""
    tokens = write_tokens(tmp_path / "tokens")
    async with serving(Faulty()) as address, standby_of(address, tmp_path, 0.2, tokens) as (channel, _, _):
        for token in ("", "guess-0123456789"):
            call = channel.unary_unary(UPLOAD)(b"", metadata=(*headers(token), (QUESTION, "1"), (ACCEPTED, "1")), timeout=60)
            assert (await refusal(call)).reason == "DEADLINE_EXCEEDED"


async def test_browsers_of_the_page_do_not_share_their_refusals(tmp_path: Path) -> None:
    """All calls of the page come from its own address."""
    tokens = write_tokens(tmp_path / "tokens")
    async with (
        token_leader(tokens) as (address, _),
        standby_of(address, tmp_path, tokens=tokens, page_key="the page's key") as (channel, _, _),
    ):
        get = job_pb2_grpc.JobServiceStub(channel).Get
        for number in range(FREE + 10):
            page = (PEER, f"ipv4:203.0.113.{number}:0"), (KEY, "the page's key")
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await get(job_pb2.GetJobRequest(job_id="x"), metadata=(*headers("guess-0123456789"), *page))
            assert "retry_after_s" not in from_rpc_error(failed.value, server="here").metadata, number


class Recorder(grpc.GenericRpcHandler):
    """A leader that records what reaches it."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.left_s: float | None = None
        self.sent = self.received = 0
        self.ended = asyncio.Event()
        self.may_read = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        behavior = self._watch if details.method == WATCH else self._upload
        return grpc.stream_stream_rpc_method_handler(behavior)

    async def _watch(self, _: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        self.metadata, self.left_s = dict(context.invocation_metadata() or ()), context.time_remaining()
        try:
            while True:
                yield MESSAGE
                self.sent += 1
        finally:
            self.ended.set()

    async def _upload(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        await self.may_read.wait()
        async for _request in requests:
            self.received += 1
        yield b""


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[tuple[Recorder, grpc.aio.Channel]]:
    recorder = Recorder()
    async with serving(recorder) as address, standby_of(address, tmp_path) as (channel, _, _):
        yield recorder, channel


async def settled(count: Any) -> int:
    """Return a count once it has not grown for half a second."""
    last = -1
    while (now := count()) != last:
        last = now
        await asyncio.sleep(0.5)
    return last


async def test_a_reader_that_waits_holds_the_leader_back_and_its_leaving_ends_the_call(
    recorded: tuple[Recorder, grpc.aio.Channel],
) -> None:
    recorder, channel = recorded
    claimed = ((PEER, "ipv4:6.6.6.6:6"), ("authorization", "Bearer x"), ("etfarm-project", "p"))
    call = channel.unary_stream(WATCH)(b"", metadata=claimed, timeout=60)
    assert await call.read() == MESSAGE
    assert await settled(lambda: recorder.sent) < 64, "the standby reads faster than its caller"
    call.cancel()
    await asyncio.wait_for(recorder.ended.wait(), 30)
    assert recorder.metadata[PEER].startswith("ipv4:127.0.0.1:") and recorder.metadata[KEY] == SECRET
    assert recorder.metadata["authorization"] == "Bearer x" and recorder.metadata["etfarm-project"] == "p"
    assert recorder.left_s is not None and 40 < recorder.left_s < 61, "gRPC rounds what is left up"


async def test_a_leader_that_does_not_read_holds_the_writer_back(recorded: tuple[Recorder, grpc.aio.Channel]) -> None:
    recorder, channel = recorded
    call, written = channel.stream_unary(UPLOAD), 0

    async def requests() -> AsyncIterator[bytes]:
        nonlocal written
        for _ in range(200):
            yield MESSAGE
            written += 1

    answer = asyncio.ensure_future(call(requests()))
    assert await settled(lambda: written) < 64, "the standby takes more than the leader"
    recorder.may_read.set()
    assert await answer == b""
    assert recorder.received == 200


async def test_a_deadline_ends_the_call_at_the_leader(recorded: tuple[Recorder, grpc.aio.Channel]) -> None:
    recorder, channel = recorded
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in channel.unary_stream(WATCH)(b"", timeout=0.5):
            await asyncio.sleep(0.05)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(recorder.ended.wait(), 10)
    assert time.monotonic() - began < 10


async def test_servers_trust_the_certificate_that_the_leader_has_published(tmp_path: Path) -> None:
    names = {name: tmp_path / name for name in ("cert", "key", "ca")}
    authority = trustme.CA()
    identity = authority.issue_cert("127.0.0.1")
    identity.private_key_pem.write_to_path(names["key"])
    names["key"].chmod(0o600)
    authority.cert_pem.write_to_path(names["ca"])
    chain = b"".join(blob.bytes() for blob in identity.cert_chain_pems)
    names["cert"].write_bytes(chain)
    with serve(tmp_path, "--tls-cert", str(names["cert"]), "--tls-key", str(names["key"])) as daemon:
        config = Config(parse_address("127.0.0.1:0"), tmp_path, tls_cert=names["cert"], tls_key=names["key"])
        leader = Leader(1, address_of(daemon), "", chain.decode(), SECRET)
        async with standing_by(config, Leadership(leader)) as own, open_channel(Access(own, tls_ca=names["ca"])) as channel:
            info = await farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest())
            assert info.forwarded_by == own
        other = trustme.CA().issue_cert("127.0.0.1").cert_chain_pems[0].bytes().decode()
        stranger = Leader(1, address_of(daemon), "", other, SECRET)
        short = standing_by(config, Leadership(stranger), wait_s=1.0)
        async with short as own, open_channel(Access(own, tls_ca=names["ca"])) as channel:
            error = await refusal(farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest()))
            assert error.reason == "NO_LEADER"
