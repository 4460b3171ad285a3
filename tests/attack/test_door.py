"""Attacks on authentication and connection limits of a real server process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sqlite3
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from etfarm.server.rpc.door.connections import most_connections
from etfarm.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    artifact_pb2,
    artifact_pb2_grpc,
    audit_pb2,
    audit_pb2_grpc,
    common_pb2,
    device_pb2,
    farm_pb2,
    token_pb2,
    token_pb2_grpc,
)
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.chunks import artifact_of, upload
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.contract import WAIT_S, address_of, call
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.door import ADMIN, LINES, USER, Door, create, ended, farm_info, watch, watch_devices
from tests.support.door import admin as admin
from tests.support.door import door as door
from tests.support.door import new_door as new_door
from tests.support.http2 import Http2
from tests.support.refusals import refusal

pytestmark = pytest.mark.slow(reason="floods a server with connections")

NewDoor = Callable[..., AbstractContextManager[Door]]
MIB = 1 << 20
INFO = "/etfarm.v1.FarmService/GetServerInfo"
SUBMIT = "/etfarm.v1.JobService/Submit"
PROOF = "/etfarm.v1.FarmService/GetProof"


# What a stranger costs


@pytest.mark.parametrize("token", ["", "guess-0123456789-guess"])
async def test_large_messages_without_a_token_cost_no_memory(door: Door, admin: grpc.aio.Channel, token: str) -> None:
    message = bytes(62 * MIB)
    before = door.forget_peak()
    for _ in range(4):  # sixteen in all, four at a time: the attacker needs the memory too
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(
                        door.address,
                        options=[("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
                    )
                )
                for _ in range(4)
            ]
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            calls = [channel.unary_unary(SUBMIT)(message, metadata=metadata, timeout=WAIT_S) for channel in channels]
            for error in await asyncio.gather(*(refusal(running) for running in calls)):
                assert error.reason == "UNAUTHENTICATED"
    assert door.memory() - before < 50 * MIB
    await call(admin, "FarmService.GetServerInfo")


@pytest.mark.parametrize(("calls", "connections"), [(24, 24), (60, 1)])
async def test_many_large_messages_without_a_token_cost_no_memory(
    door: Door, admin: grpc.aio.Channel, calls: int, connections: int
) -> None:
    before = door.forget_peak()
    for error in await large_calls(door, SUBMIT, calls, connections):
        assert error.reason == "UNAUTHENTICATED"
    assert door.memory() - before < 100 * MIB
    await call(admin, "FarmService.GetServerInfo")


async def test_large_messages_in_place_of_a_request_for_a_proof_cost_no_memory(door: Door, admin: grpc.aio.Channel) -> None:
    before = door.forget_peak()
    for error in await large_calls(door, PROOF, 24, 24):
        assert error.reason == "BAD_PROOF_REQUEST"
    assert door.memory() - before < 100 * MIB
    await call(admin, "FarmService.GetServerInfo")


async def large_calls(
    door: Door, method: str, calls: int, connections: int, token: str = "", size: int = 30 * MIB
) -> list[EtfarmError]:
    """Return how calls with large messages end."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    message = bytes(size)
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(door.address, options=options)) for _ in range(connections)
        ]
        running = [channels[index % connections].unary_unary(method)(message, metadata=metadata) for index in range(calls)]
        return await asyncio.gather(*(refusal(each) for each in running))


@pytest.mark.parametrize("method", [SUBMIT, "/etfarm.v1.ArtifactService/Upload"])
async def test_a_standby_receives_few_large_messages_of_a_caller_at_a_time(
    door: Door, admin: grpc.aio.Channel, method: str
) -> None:
    if door.leader is None:
        return  # a leader has the messages that it works on
    before = door.forget_peak()
    for error in await large_calls(door, method, 32, 1, ADMIN, 9 * MIB):
        assert error.kind == "INVALID_ARGUMENT"
    assert door.memory() - before < 250 * MIB, "all at a time take more than 300 MiB"
    await call(admin, "FarmService.GetServerInfo")


async def test_health_checks_and_reflection_require_a_token(door: Door, admin: grpc.aio.Channel) -> None:
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    for token in ("", "guess-0123456789-guess"):
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        async with grpc.aio.insecure_channel(door.address) as stranger:
            health = health_pb2_grpc.HealthStub(stranger)
            assert (await refusal(health.Check(health_pb2.HealthCheckRequest(), metadata=metadata))).reason == "UNAUTHENTICATED"
            # No request: grpc.aio loses the status when the server answers a stream in the moment of its first write.
            for method in ("/grpc.health.v1.Health/Watch", reflection):
                assert (await ended(stranger.stream_stream(method)(iter(()), metadata=metadata))).reason == "UNAUTHENTICATED"
    health = health_pb2_grpc.HealthStub(admin)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    answers = admin.stream_stream(reflection)(iter([request]))
    described = reflection_pb2.ServerReflectionResponse.FromString(await answers.read())
    assert "etfarm.v1.JobService" in {service.name for service in described.list_services_response.service}
    answers.cancel()


@cache
def gigabyte_of_zeros() -> bytes:
    """Return a gigabyte of zeros, packed by gzip as well as it can."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(1024)) + packer.flush()


@pytest.mark.parametrize("token", ["", ADMIN])
async def test_a_megabyte_that_decompresses_to_a_gigabyte_is_refused(door: Door, admin: grpc.aio.Channel, token: str) -> None:
    packed = gigabyte_of_zeros()
    assert len(packed) < 2 * MIB
    before = door.forget_peak()

    def attack() -> None:
        headers = {"grpc-encoding": "gzip"} | ({"authorization": f"Bearer {token}"} if token else {})
        for _ in range(4):
            with Http2(door.address, timeout_s=WAIT_S) as connection:
                connection.begin()
                connection.call(SUBMIT, headers, packed, compressed=True)

    await asyncio.to_thread(attack)
    assert door.memory() - before < 30 * MIB
    await call(admin, "FarmService.GetServerInfo")


async def test_a_thousand_idle_connections_do_not_block_others(new_door: NewDoor, tmp_path: Path) -> None:
    files, many = 700, 1300
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard > many + 200, "this test needs more open files"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with new_door(tmp_path, files=files) as door:
            host, _, port = door.address.rpartition(":")
            async with door.channel() as first:
                await call(first, "FarmService.GetServerInfo")
                with contextlib.ExitStack() as stack:
                    for index in range(many):
                        attacker = stack.enter_context(socket.socket())
                        attacker.bind((f"127.0.0.{2 + index % 3}", 0))
                        attacker.settimeout(WAIT_S)
                        with contextlib.suppress(OSError):  # closed as it comes
                            attacker.connect((host, int(port)))
                            attacker.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
                    assert len(os.listdir(f"/proc/{door.daemon.pid}/fd")) < files - 50  # noqa: PTH208
                    # A call, a child of the compile workers, and somebody who comes now.
                    await call(first, "FarmService.GetServerInfo")
                    (recipes,) = await call(first, "CompileService.ListRecipes")
                    assert recipes.recipes
                    async with door.channel() as second:
                        await farm_info(second)
            assert "Too many open files" not in door.daemon.log.read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("greets", [False, True])
async def test_a_connection_without_a_valid_token_is_closed(door: Door, greets: bool) -> None:
    def measure_idle_s() -> float:
        with Http2(door.address, timeout_s=WAIT_S) as connection:
            if greets:
                connection.begin()
            start_s = time.monotonic()
            connection.until_closed()
            return time.monotonic() - start_s

    assert await asyncio.to_thread(measure_idle_s) < WAIT_S


async def test_much_metadata_makes_no_connection_a_users(door: Door) -> None:
    """What fits one server fits the leader, too, and no error of gRPC's own counts as an answer to a user."""

    def call_once() -> None:
        with Http2(door.address, timeout_s=WAIT_S) as connection:
            connection.begin()
            connection.call(INFO, {"x-much": "x" * 15_700}, b"", compressed=False)
            connection.until_closed()

    async with door.channel() as channel:
        ask = channel.unary_unary(INFO, response_deserializer=farm_pb2.ServerInfo.FromString)
        assert (await ask(b"", metadata=(("x-much", "x" * 15_700),))).principal.name == "ann"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(b"", metadata=(("x-much", "x" * 18_000),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await asyncio.to_thread(call_once)


@pytest.mark.parametrize("value", [b"\xff", b"a\x01b", "é".encode()], ids=["binary", "control", "letter"])
async def test_metadata_that_grpc_would_not_send_hold_up_no_caller(door: Door, value: bytes) -> None:
    """More callers than a standby asks the leader about at a time; each keeps its connection until it has its answer."""
    address = door.address

    def call(token: str) -> bool:
        with Http2(address, timeout_s=WAIT_S) as connection:
            connection.begin()
            known = {"authorization": f"Bearer {token}"} if token else {}
            return connection.call(INFO, known | {"x-odd": value}, b"", compressed=False)

    answers = await asyncio.gather(*(asyncio.to_thread(call, token) for token in ("", "guess-0123456789") * 6))
    assert all(answers), "closed after 15 s without an answer"
    assert await asyncio.to_thread(call, ADMIN)


def test_connections_leave_room_for_files() -> None:
    for files in (1024, 20_000, 65_536):
        assert 0 < most_connections(files) <= files - 192
    assert most_connections(256) == 64
    assert most_connections(65_536) == 8192


async def test_repeated_failures_are_throttled_without_blocking_others_at_the_address(
    door: Door, admin: grpc.aio.Channel
) -> None:
    async with door.channel("guess-0123456789-guess") as stranger:
        waits = []
        for _ in range(130):
            try:
                await farm_info(stranger)
            except grpc.aio.AioRpcError as error:
                failed = from_rpc_error(error, server="here")
                assert failed.reason == "UNAUTHENTICATED"
                waits.append(float(failed.metadata.get("retry_after_s", 0)))
        assert len(waits) == 130
        assert waits[-1] == 60
        await call(admin, "FarmService.GetServerInfo")
        async with door.channel() as another:
            await farm_info(another)


# Tokens


async def test_new_tokens_are_valid_at_once_and_revoked_ones_end_what_is_forwarded(door: Door, admin: grpc.aio.Channel) -> None:
    address = door.address if door.leader is None else address_of(door.leader)
    async with open_channel(Access(address, ADMIN)) as leader:
        tokens = token_pb2_grpc.TokenServiceStub(leader)
        for number in range(20):
            created = await create(leader, f"new-{number}")
            async with door.channel(created.secret) as channel:
                assert (await farm_info(channel)).principal.name == f"new-{number}"
                assert (await watch(channel).read()).status == health_pb2.HealthCheckResponse.SERVING
        async with door.channel(created.secret) as channel:
            streams = watch(channel), watch_devices(channel)
            for stream in streams:
                await stream.read()
            await tokens.Revoke(token_pb2.RevokeTokenRequest(id=created.token.id))
            for stream in streams:
                assert (await ended(stream)).reason == "UNAUTHENTICATED"
            assert (await refusal(farm_info(channel))).reason == "UNAUTHENTICATED"


async def test_a_revoked_token_ends_only_its_own_streams(door: Door, admin: grpc.aio.Channel) -> None:
    created, kept = await create(admin, "eve"), await create(admin, "eve")
    assert created.secret.startswith("etf_") and created.secret not in str(created.token)
    async with door.channel(created.secret) as channel, door.channel(kept.secret) as other:
        stream, going_on = watch(channel), watch(other)
        await stream.read()
        await going_on.read()
        await token_pb2_grpc.TokenServiceStub(admin).Revoke(token_pb2.RevokeTokenRequest(id=created.token.id))
        assert (await refusal(farm_info(channel))).reason == "UNAUTHENTICATED"
        error = await ended(stream)
        assert (error.reason, error.kind) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        await farm_info(other)
        assert not going_on.done()
        going_on.cancel()


async def test_an_unread_download_ends_with_its_token(door: Door, admin: grpc.aio.Channel) -> None:
    data = os.urandom(32 * MIB)
    artifact = artifact_of(data)
    await upload(artifact_pb2_grpc.ArtifactServiceStub(admin), artifact, data)
    created = await create(admin, "eve", common_pb2.ROLE_ADMIN)
    async with door.channel(created.secret) as channel:
        stream = artifact_pb2_grpc.ArtifactServiceStub(channel).Download(
            artifact_pb2.DownloadArtifactRequest(digest=artifact.digest)
        )
        beside = watch(channel)
        await stream.read()
        await beside.read()
        await token_pb2_grpc.TokenServiceStub(admin).Revoke(token_pb2.RevokeTokenRequest(id=created.token.id))
        assert (await ended(beside)).reason == "UNAUTHENTICATED"  # both are ended at the same moment
        taken = 0
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            async for chunk in stream:
                taken += len(chunk.data)
        assert taken < len(data) - MIB


async def test_an_expired_token_ends_its_streams(door: Door, admin: grpc.aio.Channel) -> None:
    created = await create(admin, "eve", lifetime_s=3.0)
    async with door.channel(created.secret) as channel:
        stream = watch(channel)
        await stream.read()
        assert (await ended(stream)).reason == "UNAUTHENTICATED"
        assert "has expired" in (await refusal(farm_info(channel))).message


async def test_removing_a_token_from_the_file_ends_its_streams(new_door: NewDoor, tmp_path: Path) -> None:
    with new_door(tmp_path) as door:
        async with door.channel(USER) as users, door.channel() as admins:
            stream, kept = watch(users), watch(admins)
            await stream.read()
            await kept.read()
            door.write(LINES[0], "half a li")
            async with asyncio.timeout(WAIT_S):
                while "the previous tokens stay valid" not in door.daemon.log.read_text():  # noqa: ASYNC110 - another process's log
                    await asyncio.sleep(0.1)  # until the server has looked
            await farm_info(users)
            assert not stream.done()
            door.write(LINES[0], f"cy viewer {USER[::-1]}")
            assert (await ended(stream)).reason == "UNAUTHENTICATED"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async with asyncio.timeout(WAIT_S):
                    while True:  # a leader may read the file a moment later than its standby
                        await farm_info(users)
            assert from_rpc_error(refused.value, server="here").reason == "UNAUTHENTICATED"
            async with door.channel(USER[::-1]) as viewers:
                assert (await farm_info(viewers)).principal.name == "cy"
            assert not kept.done()
            kept.cancel()
        assert ADMIN not in door.daemon.log.read_text()


async def test_only_its_owner_and_an_admin_rotate_a_token(door: Door, admin: grpc.aio.Channel) -> None:
    mine, other = await create(admin, "eve"), await create(admin, "mallory")
    async with door.channel(mine.secret) as channel:
        tokens = token_pb2_grpc.TokenServiceStub(channel)
        error = await refusal(tokens.Rotate(token_pb2.RotateTokenRequest(id=other.token.id)))
        assert error.reason == "TOKEN_NOT_FOUND"
        fresh = await tokens.Rotate(token_pb2.RotateTokenRequest())
        assert (fresh.token.id, fresh.token.principal) == (mine.token.id, "eve")
        assert (await refusal(farm_info(channel))).reason == "UNAUTHENTICATED"
    async with door.channel(fresh.secret) as channel:
        assert (await farm_info(channel)).principal.name == "eve"
    async with door.channel(USER) as channel:
        error = await refusal(token_pb2_grpc.TokenServiceStub(channel).Rotate(token_pb2.RotateTokenRequest()))
        assert error.reason == "TOKEN_NOT_FOUND"


@pytest.mark.remedy("BAD_TOKEN_REQUEST")
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"principal": "two words"}, "BAD_TOKEN_REQUEST"),
        ({"principal": "x" * 65}, "BAD_TOKEN_REQUEST"),
        ({"principal": "eve", "role": 0}, "BAD_TOKEN_REQUEST"),
        ({"principal": "eve", "role": 99}, "LIMIT_EXCEEDED"),
        ({"principal": "eve", "enrolment": True}, "BAD_TOKEN_REQUEST"),
        ({"principal": "eve", "lifetime_s": 0.0}, "BAD_TOKEN_REQUEST"),
        ({"principal": "eve", "lifetime_s": float("nan")}, "LIMIT_EXCEEDED"),
        ({"principal": "eve", "lifetime_s": float("inf")}, "LIMIT_EXCEEDED"),
        ({"principal": "eve", "projects": ["nowhere"]}, "PROJECT_NOT_FOUND"),
    ],
)
async def test_an_invalid_token_definition_is_refused(admin: grpc.aio.Channel, values: dict[str, Any], reason: str) -> None:
    request = token_pb2.CreateTokenRequest(**{"role": common_pb2.ROLE_USER, **values})
    error = await refusal(token_pb2_grpc.TokenServiceStub(admin).Create(request))
    assert error.reason == reason
    assert (await create(admin, "eve")).secret


async def test_secrets_are_not_in_the_database_and_tokens_outlive_the_server(new_door: NewDoor, tmp_path: Path) -> None:
    with new_door(tmp_path) as door:
        async with door.channel() as channel:
            created = await create(channel, "eve", projects=["default"])
        door.kill9()
        assert not door.has_stored(created.secret) and door.has_stored(created.token.id)
        door.start()
        async with door.channel(created.secret) as channel:
            assert (await farm_info(channel)).principal.name == "eve"


def enroll(channel: grpc.aio.Channel, agent_id: str) -> Any:
    request = agent_pb2.EnrollAgentRequest(protocol_version=PROTOCOL_VERSION, agent_id=agent_id)
    return agent_pb2_grpc.AgentServiceStub(channel).Enroll(request)


@pytest.mark.remedy("NOT_AN_ENROLMENT_TOKEN")
async def test_an_enrolment_token_enrolls_a_single_agent(door: Door, admin: grpc.aio.Channel) -> None:
    created = await create(admin, "board-7", common_pb2.ROLE_AGENT, enrolment=True)
    assert created.secret.startswith("etfe_")
    async with door.channel(created.secret) as channel:
        agents = agent_pb2_grpc.AgentServiceStub(channel)
        assert (await refusal(farm_info(channel))).reason == "PERMISSION_DENIED"
        # Without a message: grpc.aio replaces the status by INTERNAL when the server ends the stream in the moment of a write.
        # An agent tries again, and has the status after one or two tries.
        assert (await refusal(agents.Connect().read())).reason == "PERMISSION_DENIED"
        enrolled = await enroll(channel, "the-agent")
        assert enrolled.principal == "board-7"
        error = await refusal(enroll(channel, "another"))
        assert error.reason == "NOT_AN_ENROLMENT_TOKEN"
    async with door.channel(enrolled.token) as channel:
        principal = (await farm_info(channel)).principal
        assert (principal.name, principal.role, principal.agent_id) == ("board-7", common_pb2.ROLE_AGENT, "the-agent")
        error = await refusal(enroll(channel, "the-agent"))
        assert error.reason == "NOT_AN_ENROLMENT_TOKEN"
        # Another principal's enrolment does not take the identity; the same one's replaces a token that was lost.
        thief = await create(admin, "thief", common_pb2.ROLE_AGENT, enrolment=True)
        async with door.channel(thief.secret) as other:
            error = await refusal(enroll(other, "the-agent"))
            assert (error.reason, error.metadata["agent_id"]) == ("AGENT_BOUND", "the-agent")
        again = await create(admin, "board-7", common_pb2.ROLE_AGENT, enrolment=True)
        async with door.channel(again.secret) as other:
            await enroll(other, "the-agent")
        assert (await refusal(farm_info(channel))).reason == "UNAUTHENTICATED"


@pytest.mark.remedy("AGENT_BOUND")
async def test_an_enrolment_token_cannot_take_a_known_agents_identity(door: Door, admin: grpc.aio.Channel) -> None:
    stream = agent_pb2_grpc.AgentServiceStub(admin).Connect()
    device = device_pb2.Device(id="door-pi", name="door-pi", arch="aarch64")
    hello = agent_pb2.Hello(agent_id="old-agent", protocol_version=PROTOCOL_VERSION, devices=[device], boot_id="here")
    await stream.write(agent_pb2.AgentMessage(hello=hello))
    assert (await stream.read()).HasField("welcome")
    stream.cancel()
    created = await create(admin, "thief", common_pb2.ROLE_AGENT, enrolment=True)
    async with door.channel(created.secret) as channel:
        assert (await refusal(enroll(channel, "old-agent"))).reason == "AGENT_BOUND"
        bound = await agent_pb2_grpc.AgentServiceStub(admin).BindAgent(
            agent_pb2.BindAgentRequest(agent_id="old-agent", principal="thief")
        )
        assert bound.principal == "thief"
        assert (await enroll(channel, "old-agent")).token


# The audit log


async def entries(channel: grpc.aio.Channel, **which: Any) -> list[audit_pb2.AuditEntry]:
    return list((await audit_pb2_grpc.AuditServiceStub(channel).List(audit_pb2.ListAuditEntriesRequest(**which))).entries)


async def test_changes_and_refusals_are_in_the_audit_log(door: Door, admin: grpc.aio.Channel) -> None:
    created = await create(admin, "carol")
    (entry,) = await entries(admin, action="TokenService.Create", page_size=1)
    assert (entry.principal, entry.role, entry.peer, entry.outcome) == ("ann", common_pb2.ROLE_ADMIN, "127.0.0.1", "OK")
    assert entry.subject == f"carol {created.token.id}"
    with pytest.raises(grpc.aio.AioRpcError):
        await call(admin, "JobService.Cancel")
    (entry,) = await entries(admin, action="JobService.Cancel", page_size=1)
    assert entry.outcome == "JOB_NOT_FOUND"
    async with door.channel(USER) as users:
        assert (
            await refusal(audit_pb2_grpc.AuditServiceStub(users).List(audit_pb2.ListAuditEntriesRequest()))
        ).reason == "PERMISSION_DENIED"
    (entry,) = await entries(admin, principal="bob", action="AuditService.List")
    assert entry.outcome == "PERMISSION_DENIED"
    everything = await entries(admin, page_size=1000)
    assert [entry.number for entry in everything] == list(range(len(everything), 0, -1))
    assert not any(created.secret in str(entry) or ADMIN in str(entry) for entry in everything)
    page = await entries(admin, page_size=2)
    # The entry of a stream that was cancelled may come in between.
    assert page[0].number >= everything[0].number and page[1].number == page[0].number - 1
    for statement in ("DELETE FROM audit", "UPDATE audit SET principal = 'x'"):
        with pytest.raises((sqlite3.IntegrityError, psycopg.Error), match="append-only"):
            door.execute(statement)


async def test_a_flood_of_refused_calls_does_not_fill_the_audit_log(door: Door, admin: grpc.aio.Channel) -> None:
    before = len(await entries(admin, page_size=1000))
    async with door.channel("guess-0123456789-flood") as stranger:
        ask = stranger.unary_unary("/etfarm.v1.JobService/Cancel")
        for _ in range(40):
            await asyncio.gather(*(refusal(farm_info(stranger)) for _ in range(25)))
        assert (await refusal(ask(b""))).reason in ("UNAUTHENTICATED", "SERVER_UNREACHABLE")
    assert len(await entries(admin, page_size=1000)) - before < 10
