"""Hostile frames and headers before any rpc, and secrets that a client must not send to a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from etfarm.v1 import farm_pb2, farm_pb2_grpc, project_pb2, project_pb2_grpc, token_pb2, token_pb2_grpc
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error
from tests.support.contract import WAIT_S, call
from tests.support.databases import postgres_databases as postgres_databases
from tests.support.door import ADMIN, Door, create, ended, watch_devices
from tests.support.door import admin as admin
from tests.support.door import door as door
from tests.support.door import new_door as new_door
from tests.support.http2 import Http2

pytestmark = pytest.mark.slow(reason="starts servers, and waits for deadlines of connections")

INFO = b"/etfarm.v1.FarmService/GetServerInfo"


@pytest.mark.parametrize("path", [b"/\xff\xff/x", b"\xff", b"/no.such.Service/Rpc", b"/etfarm.v1.JobService/Submit\xff"])
async def test_an_arbitrary_rpc_path_is_refused_and_others_are_served(door: Door, admin: grpc.aio.Channel, path: bytes) -> None:
    def attack() -> None:
        for _ in range(3):
            with Http2(door.address, timeout_s=WAIT_S) as connection:
                connection.begin()
                connection.call(path, {}, b"", compressed=False)

    await asyncio.to_thread(attack)
    assert await call(admin, "FarmService.GetServerInfo")
    async with door.channel() as fresh:
        assert await call(fresh, "FarmService.GetServerInfo")


async def test_an_unknown_rpc_is_unimplemented(door: Door, admin: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await admin.unary_unary("/etfarm.v1.JobService/OfLater")(b"")
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("value", [b"Bearer \xff\xfe", b"Bearer \0", b"\x1b[2J", b"Bearer \r\nx: y"])
async def test_arbitrary_headers_are_refused(door: Door, admin: grpc.aio.Channel, value: bytes) -> None:
    def attack() -> None:
        with Http2(door.address, timeout_s=WAIT_S) as connection:
            connection.begin()
            connection.call(INFO, {"authorization": value, "etfarm-project": value}, b"", compressed=False)
        with Http2(door.address, timeout_s=WAIT_S) as connection:
            connection.begin()
            connection.call(INFO, {"authorization": f"Bearer {ADMIN}", "etfarm-project": value}, b"", compressed=False)

    await asyncio.to_thread(attack)
    assert "Illegal header" not in door.daemon.log.read_text()
    assert await call(admin, "FarmService.GetServerInfo")


async def test_a_stolen_token_does_not_reveal_its_replacement(door: Door, admin: grpc.aio.Channel) -> None:
    stolen = (await create(admin, "victim")).secret

    async def rotate(channel: grpc.aio.Channel) -> Any:
        try:
            return await token_pb2_grpc.TokenServiceStub(channel).Rotate(token_pb2.RotateTokenRequest())
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error, server="here")

    async with door.channel(stolen) as channel:
        await call(channel, "FarmService.GetServerInfo")
        answers = await asyncio.gather(*(rotate(channel) for _ in range(20)))
    (fresh,) = [answer for answer in answers if not isinstance(answer, EtfarmError)]
    assert {answer.reason for answer in answers if isinstance(answer, EtfarmError)} == {"UNAUTHENTICATED"}
    async with door.channel(fresh.secret) as channel:
        await call(channel, "FarmService.GetServerInfo")


@pytest.mark.remedy("PROJECTS_CHANGED")
async def test_an_open_stream_ends_when_its_caller_leaves_the_project(door: Door, admin: grpc.aio.Channel) -> None:
    projects = project_pb2_grpc.ProjectServiceStub(admin)
    for name in ("alpha", "beta"):
        await projects.Create(project_pb2.CreateProjectRequest(name=name, members=["leaver", "stayer"]))
    leaver, stayer = [(await create(admin, name)).secret for name in ("leaver", "stayer")]
    async with door.channel(leaver) as first, door.channel(stayer) as second:
        left, stayed = watch_devices(first), watch_devices(second)
        await left.read(), await stayed.read()
        await projects.AddMember(project_pb2.AddMemberRequest(project="default", principal="leaver"))
        await projects.RemoveMember(project_pb2.RemoveMemberRequest(project="beta", principal="leaver"))
        assert (await ended(left)).reason == "PROJECTS_CHANGED"
        again = watch_devices(first)
        await again.read()
        await projects.RemoveMember(project_pb2.RemoveMemberRequest(project="default", principal="leaver"))
        assert (await ended(again)).reason == "PROJECTS_CHANGED"
        assert not stayed.done()
        stayed.cancel()


async def test_a_flood_of_calls_without_a_token_cancels_no_other_call(door: Door, admin: grpc.aio.Channel) -> None:
    def attack() -> None:
        for _ in range(2):
            flood()

    def flood() -> None:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(Http2(door.address, timeout_s=WAIT_S)) for _ in range(16)]
            for connection in connections:
                connection.begin()
            for connection in connections:
                connection.flood(INFO.decode(), 1000)

    attacking = asyncio.create_task(asyncio.to_thread(attack))
    while not attacking.done():
        assert all(await asyncio.gather(*(call(admin, "FarmService.GetServerInfo") for _ in range(20))))
    await attacking


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP proxy that accepts connections and never answers; yields its address and the bytes that it received."""
    received: list[bytes] = []

    def take() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                received.append(connection.recv(4096))

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=take)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", received
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_token_for_this_machine_is_not_sent_to_a_proxy(
    door: Door, monkeypatch: pytest.MonkeyPatch, proxy: tuple[str, list[bytes]], variable: str
) -> None:
    address, received = proxy
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, address)
    async with door.channel() as channel:
        info = farm_pb2_grpc.FarmServiceStub(channel).GetServerInfo(farm_pb2.GetServerInfoRequest(), timeout=WAIT_S)
        assert (await info).principal.name == "ann"
    assert not received
