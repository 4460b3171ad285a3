"""The contract against a real server process: every rpc exists, and every refusal has its code, reason and values."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from etfarm.server.rpc.door.roles import ROLES
from etfarm.v1 import (
    agent_pb2,
    device_pb2,
    job_pb2,
)
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import PROTOCOL_VERSION
from etfarm.wire.status import from_rpc_error
from tests.support.contract import RPCS, SERVICES, WAIT_S, address_of, call
from tests.support.farm import Daemon, serve

LISTS = sorted(rpc for rpc, method in RPCS.items() if method.name.startswith("List") or rpc == "ReportService.Get")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("contract")
    with serve(folder, "--address-file", str(folder / "address")) as daemon:
        yield daemon
    assert not (folder / "address").exists()


@pytest.fixture
async def channel(server: Daemon) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(Access(address_of(server))) as opened:
        yield opened


async def refusal(channel: grpc.aio.Channel, rpc: str, *requests: Message) -> tuple[EtfarmError, grpc.aio.AioRpcError]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call(channel, rpc, *requests)
    return from_rpc_error(failed.value, server="here"), failed.value


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    """Return the only detail of a status."""

    class Call:
        code = staticmethod(error.code)
        details = staticmethod(error.details)
        trailing_metadata = staticmethod(lambda: tuple(error.trailing_metadata() or ()))

    status = rpc_status.from_call(Call())
    assert status is not None, f"{error.code()} {error.details()} has no details"
    (detail,) = status.details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    return info


def test_every_rpc_of_the_contract_has_a_row_of_roles_and_every_row_an_rpc() -> None:
    declared = {f"/{method.containing_service.full_name}/{method.name}" for method in RPCS.values()}
    assert {row for row in ROLES if row.startswith("/etfarm.v1.")} == declared
    assert all(ROLES.values())


async def test_every_rpc_is_implemented(channel: grpc.aio.Channel) -> None:
    async def check(rpc: str) -> None:
        try:
            await call(channel, rpc)
        except grpc.aio.AioRpcError as error:
            info = error_info(error)
            assert (info.domain, bool(info.reason)) == ("etfarm", True)
            assert info.metadata["fault"] in ("USER", "DEVICE", "FARM")
            assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), f"{rpc}: {error.details()}"
            assert error.code() is not grpc.StatusCode.UNIMPLEMENTED, rpc

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*map(check, RPCS))


ABSENT = "a" * 64
submission = partial(job_pb2.SubmitJobRequest, protocol_version=PROTOCOL_VERSION)
SPEC = job_pb2.JobSpec(candidates=[job_pb2.Candidate(name="net")])
SPEC.candidates[0].program.pte.digest = ABSENT


def notifying(urls: list[str]) -> job_pb2.SubmitJobRequest:
    return submission(request_id="r", spec=job_pb2.JobSpec(candidates=SPEC.candidates, notify_urls=urls))


@pytest.mark.parametrize(
    ("rpc", "request_", "code", "reason", "says"),
    [
        ("JobService.Get", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("JobService.Watch", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("DeviceService.Reserve", {"duration_s": 0.5}, "INVALID_ARGUMENT", "BAD_RESERVATION", "1 s to 86,400 s, got 0.5 s"),
        ("DeviceService.Reserve", {"duration_s": 5, "count": -1}, "INVALID_ARGUMENT", "BAD_RESERVATION", "1 to 1,000, got -1"),
        (
            "DeviceService.Watch",
            {"selector": "lable.rack=3"},
            "INVALID_ARGUMENT",
            "UNKNOWN_SELECTOR_KEY",
            "'label.rack'",
        ),
        ("DeviceService.Renew", {"reservation_id": "nothing"}, "NOT_FOUND", "RESERVATION_NOT_FOUND", "'nothing'"),
        ("DeviceService.Release", {"reservation_id": "nothing"}, "NOT_FOUND", "RESERVATION_NOT_FOUND", "'nothing'"),
        ("JobService.List", {"start_time": {"seconds": 1 << 60}}, "INVALID_ARGUMENT", "BAD_TIME_RANGE", "years 1 to 9999"),
        ("JobService.Cancel", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("JobService.TailLog", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("ReportService.Get", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("ReportService.ListOperators", {"report_id": "r"}, "NOT_FOUND", "REPORT_NOT_FOUND", "'r'"),
        ("ReportService.ListOperators", {"by": 99}, "INVALID_ARGUMENT", "LIMIT_EXCEEDED", "by"),
        ("ReportService.ListOperators", {"sort": 99}, "INVALID_ARGUMENT", "LIMIT_EXCEEDED", "sort"),
        ("ReportService.ListOperators", {"page_token": "x"}, "INVALID_ARGUMENT", "BAD_PAGE_TOKEN", "'x'"),
        ("ReportService.Compare", {"base": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("ReportService.Tag", {"job_id": "nothing", "tag": "b"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("ReportService.Tag", {"tag": "b", "remove": True}, "NOT_FOUND", "TAG_NOT_FOUND", "'b'"),
        ("ReportService.ListHistory", {"model": "net"}, "NOT_FOUND", "NO_HISTORY", "'net'"),
        ("ReportService.ListHistory", {"device": "core>=4"}, "INVALID_ARGUMENT", "UNKNOWN_SELECTOR_KEY", "cores"),
        ("ReportService.ListHistory", {"page_token": "1"}, "INVALID_ARGUMENT", "BAD_PAGE_TOKEN", "'1'"),
        ("ReportService.Analyze", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("JobService.List", {"page_token": "x"}, "INVALID_ARGUMENT", "BAD_PAGE_TOKEN", "'x'"),
        ("JobService.List", {"page_token": "9" * 40}, "INVALID_ARGUMENT", "BAD_PAGE_TOKEN", "page token"),
        ("JobService.List", {"page_size": -1}, "INVALID_ARGUMENT", "BAD_PAGE_TOKEN", "-1"),
        ("JobService.Submit", {"request_id": "r", "spec": SPEC}, "FAILED_PRECONDITION", "CLIENT_TOO_OLD", "before 0.3.0"),
        ("JobService.Submit", submission(spec=SPEC), "INVALID_ARGUMENT", "BAD_JOB", "request_id"),
        ("JobService.Submit", submission(request_id="r"), "INVALID_ARGUMENT", "NO_CANDIDATE", "no candidate"),
        ("JobService.Submit", submission(request_id="r", spec=SPEC), "FAILED_PRECONDITION", "ARTIFACT_MISSING", "aaaa"),
        ("DeviceService.Get", {"device_id": "pi"}, "NOT_FOUND", "DEVICE_NOT_FOUND", "'pi'"),
        ("DeviceService.List", {"selector": "core>=4"}, "INVALID_ARGUMENT", "UNKNOWN_SELECTOR_KEY", "cores"),
        ("DeviceService.List", {"selector": "fast"}, "INVALID_ARGUMENT", "BAD_SELECTOR", "KEY OP VALUE"),
        ("CompileService.GetCompilation", {"key": "k"}, "NOT_FOUND", "COMPILATION_NOT_FOUND", "k"),
        ("ArtifactService.FindMissing", {"digests": ["x"]}, "INVALID_ARGUMENT", "DIGEST_MALFORMED", "'x'"),
        ("ArtifactService.GetUploadStatus", {"digest": "x"}, "INVALID_ARGUMENT", "DIGEST_MALFORMED", "'x'"),
        ("ArtifactService.Upload", {}, "INVALID_ARGUMENT", "NO_HEADER", "header"),
        ("ArtifactService.Download", {"digest": ABSENT}, "NOT_FOUND", "ARTIFACT_NOT_FOUND", "aaaa"),
        ("FarmService.AddBundle", {"digest": ABSENT}, "FAILED_PRECONDITION", "ARTIFACT_MISSING", "aaaa"),
        ("AgentService.Connect", {}, "INVALID_ARGUMENT", "NO_HELLO", "Hello"),
        ("AgentService.Connect", {"hello": {"protocol_version": 9}}, "FAILED_PRECONDITION", "PROTOCOL_UNSUPPORTED", "protocol 9"),
        (
            "AgentService.Connect",
            {"hello": {"protocol_version": 2}},
            "FAILED_PRECONDITION",
            "PROTOCOL_UNSUPPORTED",
            "server's version",
        ),
        ("AgentService.UpgradeAgent", {"digest": ABSENT}, "FAILED_PRECONDITION", "ARTIFACT_MISSING", "aaaa"),
        ("AgentService.UpgradeAgent", {"digest": ABSENT, "time_limit_s": 1}, "INVALID_ARGUMENT", "BAD_UPGRADE", "5 to 3600"),
        ("WebhookService.Create", {"url": "ftp://a/"}, "INVALID_ARGUMENT", "BAD_WEBHOOK", "https"),
        ("WebhookService.Create", {"url": "http://[::1]/"}, "PERMISSION_DENIED", "WEBHOOK_HOST_REFUSED", "not public"),
        ("WebhookService.Delete", {"id": "w"}, "NOT_FOUND", "WEBHOOK_NOT_FOUND", "'w'"),
        ("WebhookService.ListDeliveries", {"page_token": "x"}, "INVALID_ARGUMENT", "BAD_PAGE_TOKEN", "'x'"),
        ("WebhookService.ReportGate", {"job_id": "nothing"}, "NOT_FOUND", "JOB_NOT_FOUND", "'nothing'"),
        ("JobService.Submit", notifying(["http://127.0.0.1/"]), "PERMISSION_DENIED", "WEBHOOK_HOST_REFUSED", "public"),
        ("JobService.Submit", notifying(["http://a.example/"] * 6), "INVALID_ARGUMENT", "BAD_WEBHOOK", "at most 5"),
    ],
)
async def test_a_refusal_carries_its_code_reason_and_values(
    channel: grpc.aio.Channel, rpc: str, request_: Message | dict[str, Any], code: str, reason: str, says: str
) -> None:
    """`request_`: a message, or its fields."""
    error, raw = await refusal(channel, rpc, request_of(rpc, **request_) if isinstance(request_, dict) else request_)
    assert (raw.code().name, error.reason) == (code, reason)
    assert says in str(error)
    info = error_info(raw)
    assert (info.domain, info.reason, info.metadata["fault"]) == ("etfarm", reason, "USER")
    assert info.metadata["message"] == error.message
    assert info.metadata.get("remedy", "") == error.remedy
    assert raw.details() == f"{error.message} {error.remedy}".strip()


def request_of(rpc: str, **fields: Any) -> Message:
    """Return the request of an rpc."""
    return message_factory.GetMessageClass(RPCS[rpc].input_type)(**fields)


def test_every_list_is_paged() -> None:
    assert {"JobService.List", "CompileService.ListRecipes", "FarmService.ListBundles", "AgentService.ListAgents"} < set(LISTS)
    for rpc in LISTS:
        assert {"page_size", "page_token"} <= set(RPCS[rpc].input_type.fields_by_name), rpc
        assert "next_page_token" in RPCS[rpc].output_type.fields_by_name, rpc


@pytest.mark.parametrize("rpc", LISTS)
async def test_a_page_that_does_not_exist_is_refused(channel: grpc.aio.Channel, rpc: str) -> None:
    for request in (request_of(rpc, page_token="no such page"), request_of(rpc, page_size=-1)):
        error, raw = await refusal(channel, rpc, request)
        assert (raw.code().name, error.reason) == ("INVALID_ARGUMENT", "BAD_PAGE_TOKEN"), request


async def test_recipes_are_paged(channel: grpc.aio.Channel) -> None:
    rpc = "CompileService.ListRecipes"
    (whole,) = await call(channel, rpc)
    names, token = [], ""
    while True:
        (page,) = await call(channel, rpc, request_of(rpc, page_size=3, page_token=token))
        assert 0 < len(page.recipes) <= 3
        names += [recipe.name for recipe in page.recipes]
        if not (token := page.next_page_token):
            break
    assert names == [recipe.name for recipe in whole.recipes]
    assert len(names) > 3 and not whole.next_page_token


async def test_every_service_is_serving(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", *(service.full_name for service in SERVICES.values())):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, name


async def test_reflection_lists_every_service(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    (answer,) = [answer async for answer in stub.ServerReflectionInfo(ask())]
    listed = {service.name for service in answer.list_services_response.service}
    assert {service.full_name for service in SERVICES.values()} <= listed
    assert "grpc.health.v1.Health" in listed


async def test_the_server_reports_its_version_and_the_caller(channel: grpc.aio.Channel) -> None:
    (info,) = await call(channel, "FarmService.GetServerInfo")
    assert info.version
    assert (info.principal.name, info.principal.role) == ("local", 1)
    (listed,) = await call(channel, "DeviceService.List")
    assert (info.devices_known, info.live_jobs) == (len(listed.devices), 0)


@pytest.mark.remedy("BAD_RETIREMENT", "BAD_UPGRADE")
@pytest.mark.parametrize(
    ("rpc", "reason", "wrong", "right", "following"),
    [
        ("DeviceService.Retire", "BAD_RETIREMENT", device_pb2.RetireDeviceRequest(device_id="nothing", drain_s=-1.0),
         device_pb2.RetireDeviceRequest(device_id="nothing", drain_s=60.0), "DEVICE_NOT_FOUND"),
        ("AgentService.UpgradeAgent", "BAD_UPGRADE", agent_pb2.UpgradeAgentRequest(digest=ABSENT, time_limit_s=1.0),
         agent_pb2.UpgradeAgentRequest(digest=ABSENT, time_limit_s=60.0), "ARTIFACT_MISSING"),
    ],
)  # fmt: skip
async def test_a_time_within_the_bounds_is_taken(
    channel: grpc.aio.Channel, rpc: str, reason: str, wrong: Message, right: Message, following: str
) -> None:
    assert (await refusal(channel, rpc, wrong))[0].reason == reason
    assert (await refusal(channel, rpc, right))[0].reason == following, "what is looked at next"


@pytest.mark.remedy("NO_HELLO")
async def test_an_agent_that_begins_with_its_introduction_is_welcomed(channel: grpc.aio.Channel) -> None:
    silent = agent_pb2.AgentMessage(heartbeat=agent_pb2.Heartbeat())
    assert (await refusal(channel, "AgentService.Connect", silent))[0].reason == "NO_HELLO"
    hello = agent_pb2.Hello(agent_id="introduced", protocol_version=PROTOCOL_VERSION, boot_id="here")
    (welcome, *_) = await call(channel, "AgentService.Connect", agent_pb2.AgentMessage(hello=hello))
    assert welcome.HasField("welcome")


@pytest.mark.remedy("UNIMPLEMENTED")
async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await channel.unary_unary("/etfarm.v1.JobService/Nothing")(b"")
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert from_rpc_error(failed.value, server="here").reason == "UNIMPLEMENTED"
    await call(channel, "FarmService.GetServerInfo")  # which this server has


async def test_malformed_messages_are_refused_and_the_server_continues(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary("/etfarm.v1.JobService/Get")(b"\xff\xff\xff")
    await call(channel, "FarmService.GetServerInfo")


async def test_an_agents_device_stays_known_while_offline(channel: grpc.aio.Channel) -> None:
    connect = channel.stream_stream(
        "/etfarm.v1.AgentService/Connect",
        request_serializer=agent_pb2.AgentMessage.SerializeToString,
        response_deserializer=agent_pb2.ServerMessage.FromString,
    )
    device = device_pb2.Device(id="contract-pi", name="board", arch="aarch64")
    hello = agent_pb2.Hello(
        agent_id="agent-1", protocol_version=PROTOCOL_VERSION, devices=[device], active_attempts=["long gone"], boot_id="here"
    )

    async def state() -> int:
        (result,) = await call(channel, "DeviceService.Get", device_pb2.GetDeviceRequest(device_id="contract-pi"))
        return int(result.state)

    async with asyncio.timeout(WAIT_S):
        stream = connect()
        await stream.write(agent_pb2.AgentMessage(hello=hello))
        welcome, cancel = await stream.read(), await stream.read()
        assert welcome.welcome.heartbeat_interval_s > 0
        assert cancel.cancel_run.attempt_id == "long gone"
        # The farm has no runner for its architecture.
        assert await state() == device_pb2.DEVICE_STATE_UNUSABLE
        error, _ = await refusal(channel, "AgentService.Connect", agent_pb2.AgentMessage(hello=hello))
        assert error.reason == "AGENT_CONNECTED"
        assert await state() == device_pb2.DEVICE_STATE_UNUSABLE
        # From another machine, or after a reboot: it has to wait for what the first one says.
        moved = agent_pb2.Hello(agent_id="agent-1", protocol_version=PROTOCOL_VERSION, boot_id="elsewhere")
        copy = asyncio.create_task(refusal(channel, "AgentService.Connect", agent_pb2.AgentMessage(hello=moved)))
        while not copy.done():
            await stream.write(agent_pb2.AgentMessage(heartbeat=agent_pb2.Heartbeat()))
            await asyncio.wait([copy], timeout=0.1)
        assert (await copy)[0].reason == "AGENT_CONNECTED"
        late = agent_pb2.RunResult(attempt_id="late")
        for _ in range(2):  # a result that no run awaits is acknowledged every time
            await stream.write(agent_pb2.AgentMessage(run_result=late))
            assert (await stream.read()).ack.attempt_id == "late"
        await stream.write(agent_pb2.AgentMessage(goodbye=agent_pb2.Goodbye()))
        assert await stream.read() is grpc.aio.EOF
        assert await state() == device_pb2.DEVICE_STATE_OFFLINE
        again = connect()
        await again.write(agent_pb2.AgentMessage(hello=hello))
        assert (await again.read()).HasField("welcome")
        again.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await again.code()


async def test_an_agent_of_0_2_is_let_in_to_be_upgraded_and_gets_no_work(channel: grpc.aio.Channel) -> None:
    recorded = (Path(__file__).parents[1] / "support" / "recorded_messages" / "hello_0_2.binpb").read_bytes()
    hello = agent_pb2.AgentMessage.FromString(recorded).hello
    assert (hello.agent_version, hello.protocol_version, hello.allows_upgrade) == ("0.2.0", 3, True)
    connect = channel.stream_stream(
        "/etfarm.v1.AgentService/Connect",
        request_serializer=bytes,
        response_deserializer=agent_pb2.ServerMessage.FromString,
    )
    async with asyncio.timeout(WAIT_S):
        stream = connect()
        await stream.write(recorded)
        assert (await stream.read()).welcome.protocol_version == 3
        (listed,) = await call(channel, "AgentService.ListAgents")
        (agent,) = [agent for agent in listed.agents if agent.agent_id == hello.agent_id]
        assert agent.connected and agent.outdated and agent.allows_upgrade and agent.version == "0.2.0"
        request = device_pb2.GetDeviceRequest(device_id=hello.devices[0].id)
        (device,) = await call(channel, "DeviceService.Get", request)
        assert device.state == device_pb2.DEVICE_STATE_UNUSABLE and device.problem.reason == "AGENT_OUTDATED"
        assert "etfarm agents upgrade" in device.problem.remedy
        # Whatever its agent says of the device since.
        await stream.write(agent_pb2.AgentMessage(device_update={"device": hello.devices[0]}).SerializeToString())
        await stream.write(agent_pb2.AgentMessage(run_result={"attempt_id": "a1"}).SerializeToString())
        assert (await stream.read()).ack.attempt_id == "a1"
        (device,) = await call(channel, "DeviceService.Get", request)
        assert device.state == device_pb2.DEVICE_STATE_UNUSABLE
        stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stream.code()


def test_the_address_file_is_private_and_contains_address_and_pid(server: Daemon) -> None:
    path = server.log.parent / "address"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {"address": address_of(server), "pid": server.pid}


def test_a_second_server_on_the_same_data_is_refused_by_name(server: Daemon) -> None:
    address_of(server)
    second = Daemon(
        ["serve", "--listen", "127.0.0.1:0", "--data", str(server.log.parent / "data"), "--no-bundle"],
        server.log.parent / "second.log",
    )
    second.start()
    assert second.process is not None
    assert second.process.wait(WAIT_S) == 2
    expected = rf"etfarm: Another server \(pid {server.pid}\) uses .*/data\. Stop it, or choose another --data\.\n"
    assert re.fullmatch(expected, second.log.read_text())
