"""A server with a token file as an attacker finds it, alone or as a standby of a farm, and what a caller sees of it."""

from __future__ import annotations

import asyncio
import re
import resource
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from etfarm.server.state import schema
from etfarm.v1 import (
    common_pb2,
    device_pb2,
    device_pb2_grpc,
    farm_pb2,
    token_pb2,
    token_pb2_grpc,
)
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError
from tests.support.contract import WAIT_S, address_of, call
from tests.support.databases import TEMPLATE, PostgresDatabases
from tests.support.farm import ALONE, Daemon
from tests.support.refusals import refusal

ADMIN, USER = "secret-of-ann-0123456789", "secret-of-bob-0123456789"
LINES = (f"ann admin {ADMIN}", f"bob user {USER}")


class Door:
    """A server with a token file, on loopback.

    Args:
        files: number of files that it may open.
        lines: what the token file says.
        url: of a PostgreSQL database; the server is then a standby of a farm, which another server leads.
    """

    def __init__(self, folder: Path, *, files: int | None = None, url: str = "", lines: Sequence[str] = LINES) -> None:
        self.data, self.tokens, self._url = folder / "data", folder / "tokens", url
        self.tokens.touch(mode=0o600)
        self.write(*lines)
        arguments = ["serve", *ALONE, "--tokens", str(self.tokens)]
        self.leader: Daemon | None = None
        if url:
            arguments += ["--database", url]
            (folder / "blobs").mkdir()
            for data in (self.data, folder / "leader"):
                data.mkdir()
                (data / "artifacts").symlink_to(folder / "blobs")
            self.leader = Daemon([*arguments, "--data", str(folder / "leader")], folder / "leader.log")
        self.daemon = _Limited([*arguments, "--data", str(self.data)], folder / "serve.log", executes=True)
        self.daemon.files = files

    def start(self) -> None:
        """Start it, after the server that leads."""
        if self.leader is not None:
            self.leader.start()
            self.leader.expect("leading the farm")
        self.daemon.start()
        if self.leader is not None:
            address_of(self.daemon)
            self.daemon.expect("forwarding calls to 127")

    def kill9(self) -> None:
        """All of it is gone at once."""
        for daemon in self._daemons:
            daemon.kill9()

    def stop(self) -> None:
        """End it in order, and require that it has logged no bug."""
        for daemon in self._daemons:
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()

    @property
    def _daemons(self) -> list[Daemon]:
        """The standby first, so that it does not take the lead."""
        return [self.daemon, *([] if self.leader is None else [self.leader])]

    def execute(self, statement: str) -> None:
        """Execute a statement in the farm's database, beside the servers."""
        if self._url:
            with psycopg.connect(self._url) as connection:
                connection.execute(statement.encode())
            return
        database = sqlite3.connect(self.data / "farm.sqlite", timeout=WAIT_S)
        try:
            with database:
                database.execute(statement)
        finally:
            database.close()

    def has_stored(self, text: str) -> bool:
        """Return whether the database contains a text."""
        if self._url:
            with psycopg.connect(self._url) as connection:
                rows = [
                    connection.execute(f"SELECT t::text FROM {name} t".encode()).fetchall() for name in schema.metadata.tables
                ]
            return text in str(rows)
        return any(text.encode() in path.read_bytes() for path in self.data.glob("farm.sqlite*"))

    def write(self, *lines: str) -> None:
        """Replace what the token file says."""
        self.tokens.write_text("".join(f"{line}\n" for line in lines))

    @property
    def address(self) -> str:
        return address_of(self.daemon)

    def channel(self, token: str = ADMIN) -> grpc.aio.Channel:
        return open_channel(Access(self.address, token))

    def forget_peak(self) -> int:
        """Start the measurement of the server's memory; what it has now, in bytes."""
        Path(f"/proc/{self.daemon.pid}/clear_refs").write_text("5")
        return self.memory("VmRSS")

    def memory(self, name: str = "VmHWM") -> int:
        """Return the most memory since `forget_peak`."""
        result = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.daemon.pid}/status").read_text())
        assert result is not None
        return int(result[1]) << 10


PLACES = ("leader", "standby")
"""The servers that are attacked: one that is alone, and a standby."""


@pytest.fixture(scope="module", params=PLACES)
def new_door(request: pytest.FixtureRequest) -> Iterator[Callable[..., AbstractContextManager[Door]]]:
    """Run the tests at each place; yield what starts a server there for the time of a block."""
    databases: PostgresDatabases | None = None
    if request.param == "standby":
        databases = request.getfixturevalue("postgres_databases")

    @contextmanager
    def run(folder: Path, **options: Any) -> Iterator[Door]:
        with nullcontext("") if databases is None else databases.server.new_database(TEMPLATE) as url:
            door = Door(folder, url=url, **options)
            try:
                door.start()
                yield door
                door.stop()
            finally:
                for daemon in door._daemons:
                    daemon.stop()

    yield run


@pytest.fixture(scope="module")
def door(new_door: Callable[..., AbstractContextManager[Door]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A server for the tests of a module."""
    with new_door(tmp_path_factory.mktemp("door")) as created:
        yield created


@pytest.fixture
async def admin(door: Door) -> AsyncIterator[grpc.aio.Channel]:
    """A connected channel of an admin."""
    async with door.channel() as channel:
        await call(channel, "FarmService.GetServerInfo")
        yield channel


class _Limited(Daemon):
    """A server that may open so many files, and no more."""

    files: int | None = None

    def start(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().start()
        if self.files is not None:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (min(self.files, soft), min(self.files, hard)))


async def ended(stream: Any) -> EtfarmError:
    """How a stream of answers ends, whose answers are dropped."""

    async def drain() -> None:
        async for _ in stream:
            pass

    return await refusal(drain(), WAIT_S)


def watch(channel: grpc.aio.Channel) -> Any:
    """Return a stream that stays open as long as it may."""
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


def watch_devices(channel: grpc.aio.Channel) -> Any:
    """Return a stream of the leader that stays open as long as it may, whichever server is called."""
    return device_pb2_grpc.DeviceServiceStub(channel).Watch(device_pb2.WatchDevicesRequest())


async def create(channel: grpc.aio.Channel, name: str, role: int = common_pb2.ROLE_USER, **more: Any) -> Any:
    request = token_pb2.CreateTokenRequest(principal=name, role=role, **more)
    return await token_pb2_grpc.TokenServiceStub(channel).Create(request)


async def farm_info(channel: grpc.aio.Channel) -> farm_pb2.ServerInfo:
    """Get the server's info, reconnecting if the connection was closed."""
    ask = channel.unary_unary("/etfarm.v1.FarmService/GetServerInfo", response_deserializer=farm_pb2.ServerInfo.FromString)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await ask(b"", wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
