"""The client's stubs against a real server: what is repeated while a server is away, and what is not."""

from __future__ import annotations

import grpc
import pytest

from etfarm.v1 import job_pb2, job_pb2_grpc, session_pb2, session_pb2_grpc, token_pb2, token_pb2_grpc
from etfarm.wire.errors import EtfarmError
from tests.support.fake_servers import stubs_of


class _Away(job_pb2_grpc.JobServiceServicer, token_pb2_grpc.TokenServiceServicer, session_pb2_grpc.SessionServiceServicer):
    """Counts calls; each is refused as by a server that is away, until `failures` calls were."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls = 0

    async def refuse(self, context: grpc.aio.ServicerContext) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    async def Get(self, request: job_pb2.GetJobRequest, context: grpc.aio.ServicerContext) -> job_pb2.Job:  # type: ignore[override]
        await self.refuse(context)
        return job_pb2.Job(id=request.job_id)

    async def Create(  # type: ignore[override]
        self, request: token_pb2.CreateTokenRequest, context: grpc.aio.ServicerContext
    ) -> token_pb2.CreateTokenResponse:
        await self.refuse(context)
        return token_pb2.CreateTokenResponse(secret="s")

    async def Call(
        self, request: session_pb2.CallSessionRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.CallSessionResponse:  # type: ignore[override]
        await self.refuse(context)
        return session_pb2.CallSessionResponse()


async def test_a_call_is_repeated_until_the_server_answers() -> None:
    away = _Away(2)
    async with stubs_of(away) as stubs:
        assert (await stubs.jobs.Get(job_pb2.GetJobRequest(job_id="j"))).id == "j"
    assert away.calls == 3


async def test_a_server_that_stays_away_is_named() -> None:
    async with stubs_of(_Away(1000), wait_s=0.2) as stubs:
        with pytest.raises(EtfarmError, match=r"The server at 127\.0\.0\.1:") as caught:
            await stubs.jobs.Get(job_pb2.GetJobRequest(job_id="j"))
    assert caught.value.reason == "SERVER_UNREACHABLE"


async def test_a_secret_is_created_once() -> None:
    away = _Away(1)
    async with stubs_of(away) as stubs:
        with pytest.raises(EtfarmError) as caught:
            await stubs.tokens.Create(token_pb2.CreateTokenRequest())
        assert (caught.value.reason, away.calls) == ("SERVER_UNREACHABLE", 1)
        assert (await stubs.tokens.Create(token_pb2.CreateTokenRequest())).secret == "s"


async def test_a_call_of_a_session_is_made_once() -> None:
    away = _Away(1)
    async with stubs_of(away) as stubs:
        with pytest.raises(grpc.aio.AioRpcError):
            await stubs.sessions.Call(session_pb2.CallSessionRequest())
        assert away.calls == 1
