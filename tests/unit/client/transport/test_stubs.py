"""The client's stubs against a real server: what is repeated while a server is away, and what is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from etfarm.client.transport.retry import Patience
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import job_pb2, job_pb2_grpc, session_pb2, session_pb2_grpc, token_pb2, token_pb2_grpc
from etfarm.wire.errors import EtfarmError


class _Away:
    """Counts calls; each is refused as by a server that is away, until `failures` calls were."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    async def refuse(self, context: grpc.aio.ServicerContext) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")


class _Jobs(job_pb2_grpc.JobServiceServicer):
    def __init__(self, away: _Away) -> None:
        self.away = away

    async def Get(self, request: job_pb2.GetJobRequest, context: grpc.aio.ServicerContext) -> job_pb2.Job:  # type: ignore[override]
        await self.away.refuse(context)
        return job_pb2.Job(id=request.job_id)


class _Tokens(token_pb2_grpc.TokenServiceServicer):
    def __init__(self, away: _Away) -> None:
        self.away = away

    async def Create(  # type: ignore[override]
        self, request: token_pb2.CreateTokenRequest, context: grpc.aio.ServicerContext
    ) -> token_pb2.CreateTokenResponse:
        await self.away.refuse(context)
        return token_pb2.CreateTokenResponse(secret="s")


class _Sessions(session_pb2_grpc.SessionServiceServicer):
    def __init__(self, away: _Away) -> None:
        self.away = away

    async def Call(
        self, request: session_pb2.CallSessionRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.CallSessionResponse:  # type: ignore[override]
        await self.away.refuse(context)
        return session_pb2.CallSessionResponse()


@asynccontextmanager
async def _stubs(away: _Away, wait_s: float | None = None) -> AsyncIterator[Stubs]:
    server = grpc.aio.server()
    job_pb2_grpc.add_JobServiceServicer_to_server(_Jobs(away), server)
    token_pb2_grpc.add_TokenServiceServicer_to_server(_Tokens(away), server)
    session_pb2_grpc.add_SessionServiceServicer_to_server(_Sessions(away), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Stubs.of(channel, Patience.of(channel, "the-farm:1", wait_s))
    finally:
        await server.stop(None)


async def test_a_call_is_repeated_until_the_server_answers() -> None:
    away = _Away(2)
    async with _stubs(away) as stubs:
        assert (await stubs.jobs.Get(job_pb2.GetJobRequest(job_id="j"))).id == "j"
    assert away.calls == 3


async def test_a_server_that_stays_away_is_named() -> None:
    async with _stubs(_Away(1000), wait_s=0.2) as stubs:
        with pytest.raises(EtfarmError, match="the-farm:1") as caught:
            await stubs.jobs.Get(job_pb2.GetJobRequest(job_id="j"))
    assert caught.value.reason == "SERVER_UNREACHABLE"


async def test_a_secret_is_created_once() -> None:
    away = _Away(1)
    async with _stubs(away) as stubs:
        with pytest.raises(EtfarmError) as caught:
            await stubs.tokens.Create(token_pb2.CreateTokenRequest())
        assert (caught.value.reason, away.calls) == ("SERVER_UNREACHABLE", 1)
        assert (await stubs.tokens.Create(token_pb2.CreateTokenRequest())).secret == "s"


async def test_a_call_of_a_session_is_made_once() -> None:
    away = _Away(1)
    async with _stubs(away) as stubs:
        with pytest.raises(grpc.aio.AioRpcError):
            await stubs.sessions.Call(session_pb2.CallSessionRequest())
        assert away.calls == 1
