"""First floods against a real server process: what callers with a token notice of connections without one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.support.contract import WAIT_S, call
from tests.support.door import Door, farm_info

pytestmark = pytest.mark.slow(reason="floods a server with calls")

CONNECTIONS = 8
CLIENTS, CALLS = 64, 4


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    """A server that has seen no flood."""
    created = Door(tmp_path)
    created.daemon.start()
    try:
        yield created
    finally:
        assert created.daemon.stop() == 0
        assert "Traceback" not in created.daemon.log.read_text()


@contextlib.asynccontextmanager
async def flooded(door: Door, kind: str, seconds: float) -> AsyncIterator[asyncio.Task[dict[str, int]]]:
    """Flood the server; yield the task that returns what the attackers saw."""
    arguments = ["-m", "tests.support.flood", door.address, kind, str(CONNECTIONS), str(seconds)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)

    async def finish() -> dict[str, int]:
        output, _ = await process.communicate()
        seen: dict[str, int] = json.loads(output)
        return seen

    task = asyncio.create_task(finish())
    try:
        yield task
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait({task})


async def answered(ask: Callable[[], Awaitable[object]]) -> None:
    """Call until gRPC does not cancel the call, as it does with random ones while too many wait, and as clients do."""
    while True:
        try:
            await ask()
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise


async def call_until(door: Door, done: asyncio.Task[dict[str, int]]) -> int:
    """Call as clients do over a connection that was open before, and over new ones; return the number of calls."""
    calls = 0
    async with door.channel() as known:
        await call(known, "FarmService.GetServerInfo")
        while not done.done():
            async with asyncio.timeout(WAIT_S), door.channel() as fresh:
                await asyncio.gather(
                    answered(partial(call, known, "FarmService.GetServerInfo")), answered(partial(farm_info, fresh))
                )
            calls += 1
    return calls


@pytest.mark.parametrize("kind", ["reset", "headers"])
async def test_a_first_flood_fails_no_call_with_a_token_and_leaves_no_memory(door: Door, kind: str) -> None:
    async with door.channel() as channel:
        for _ in range(300):
            await call(channel, "FarmService.GetServerInfo")
    before = door.memory("VmRSS")
    async with flooded(door, kind, 4.0) as flood:
        assert await call_until(door, flood) > 0
        seen = flood.result()
    # Paused: an attacker that was closed would have opened other connections.
    assert seen["opened"] < 4 * CONNECTIONS
    assert "closed or paused connections" in door.daemon.log.read_text()
    async with asyncio.timeout(WAIT_S):
        while door.memory("VmRSS") > before * 1.1:  # noqa: ASYNC110 - another process's memory
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("kind", ["continuation", "data", "ping", "settings", "reconnect", "reconnect-reset"])
async def test_another_flood_fails_no_call_with_a_token(door: Door, kind: str) -> None:
    async with flooded(door, kind, 4.0) as flood:
        assert await call_until(door, flood) > 0


async def test_connections_that_flooded_are_closed(door: Door) -> None:
    started_s = time.monotonic()
    async with flooded(door, "headers", WAIT_S) as flood, door.channel() as channel:
        await call(channel, "FarmService.GetServerInfo")
        async with asyncio.timeout(WAIT_S):
            while door.daemon.log.read_text().count("closed or paused") < 2:  # noqa: ASYNC110 - another process's log
                await asyncio.sleep(0.1)
        assert not flood.done() and time.monotonic() - started_s < WAIT_S


async def test_clients_that_connect_at_once_are_all_served(door: Door) -> None:
    """Those of one address, each with calls that begin before the server has seen its token."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(door.channel()) for _ in range(CLIENTS)]
        answers = asyncio.gather(*(call(channel, "FarmService.GetServerInfo") for channel in channels for _ in range(CALLS)))
        assert len(await answers) == CLIENTS * CALLS
        burst = asyncio.gather(*(call(channels[0], "FarmService.GetServerInfo") for _ in range(256)))
        assert len(await burst) == 256
    async with door.channel() as fresh:
        assert len(await asyncio.gather(*(call(fresh, "FarmService.GetServerInfo") for _ in range(256)))) == 256
    assert "closed or paused connections" not in door.daemon.log.read_text()
