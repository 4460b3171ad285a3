"""A server with a token file as an attacker finds it, and what a caller sees of it."""

from __future__ import annotations

import asyncio
import re
import resource
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from etfarm.v1 import (
    common_pb2,
    token_pb2,
    token_pb2_grpc,
)
from etfarm.wire.channel import Access, open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import from_rpc_error
from tests.support.contract import WAIT_S, address_of
from tests.support.farm import Daemon

ADMIN, USER = "secret-of-ann-0123456789", "secret-of-bob-0123456789"
LINES = (f"ann admin {ADMIN}", f"bob user {USER}")


class Door:
    """A server with a token file, on loopback."""

    def __init__(self, folder: Path, *, files: int | None = None) -> None:
        self.data, self.tokens = folder / "data", folder / "tokens"
        self.tokens.touch(mode=0o600)
        self.write(*LINES)
        arguments = ["serve", "--listen", "127.0.0.1:0", "--data", str(self.data), "--no-bundle", "--exit-with-stdin"]
        self.daemon = _Limited([*arguments, "--no-prewarm", "--tokens", str(self.tokens)], folder / "serve.log")
        self.daemon.files = files

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


class _Limited(Daemon):
    """A server that may open so many files, and no more."""

    files: int | None = None

    def start(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().start()
        if self.files is not None:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (min(self.files, soft), min(self.files, hard)))


async def refusal(awaited: Any) -> EtfarmError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await awaited
    return from_rpc_error(failed.value, server="here")


async def ended(stream: Any) -> EtfarmError:
    """How a stream of answers ends, whose answers are dropped."""

    async def drain() -> None:
        async for _ in stream:
            pass

    async with asyncio.timeout(WAIT_S):
        return await refusal(drain())


def watch(channel: grpc.aio.Channel) -> Any:
    """Return a stream that stays open as long as it may."""
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


async def create(channel: grpc.aio.Channel, name: str, role: int = common_pb2.ROLE_USER, **more: Any) -> Any:
    request = token_pb2.CreateTokenRequest(principal=name, role=role, **more)
    return await token_pb2_grpc.TokenServiceStub(channel).Create(request)
