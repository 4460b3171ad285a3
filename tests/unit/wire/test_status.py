"""Errors over gRPC and in fields: fault, reason, remedy, stage, metadata and kind arrive as they were."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from etfarm.v1 import common_pb2
from etfarm.wire import status
from etfarm.wire.channel import SERVER_OPTIONS, Access, open_channel
from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, Fault, Kind, UserError, error_of
from tests.support.fake_servers import serving

words = st.text("ABC_", min_size=1, max_size=8)
sentences = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
metadata = st.dictionaries(st.text("abc_", min_size=1, max_size=6).map("of_".__add__), sentences, max_size=3)
errors = st.builds(
    error_of,
    st.sampled_from(Fault),
    words,
    sentences.filter(bool),
    sentences,
    kind=st.sampled_from(Kind),
    stage=words,
    metadata=metadata,
)


def described(error: EtfarmError) -> tuple[object, ...]:
    return (error.fault, error.reason, error.message, error.remedy, error.stage, error.metadata, str(error))


def rpc_error(sent: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(sent.code, grpc.aio.Metadata(), grpc.aio.Metadata(*sent.trailing_metadata), sent.details)


@given(errors)
def test_an_error_survives_a_status(error: EtfarmError) -> None:
    again = status.from_rpc_error(rpc_error(status.to_status(error)), server="there")
    assert described(again) == described(error)
    assert again.kind is error.kind
    assert type(again) is {Fault.USER: UserError, Fault.DEVICE: DeviceError, Fault.FARM: FarmError}[error.fault]


@given(errors)
def test_an_error_survives_a_message(error: EtfarmError) -> None:
    text = common_pb2.Error.FromString(status.to_proto(error).SerializeToString())
    assert described(status.from_proto(text)) == described(error)


def test_a_status_carries_error_info_as_the_contract_says() -> None:
    error = error_of(Fault.USER, "NO_SUCH", "No x.", "Make one.", kind=Kind.NOT_FOUND, stage="LOAD", metadata={"x": "1"})
    sent = status.to_status(error)
    assert (sent.code, sent.details) == (grpc.StatusCode.NOT_FOUND, "No x. Make one.")
    (detail,) = rpc_status.from_call(FakeCall(sent)).details
    info = error_details_pb2.ErrorInfo()
    assert detail.Unpack(info)
    assert (info.domain, info.reason) == ("etfarm", "NO_SUCH")
    assert dict(info.metadata) == {"fault": "USER", "message": "No x.", "remedy": "Make one.", "stage": "LOAD", "x": "1"}


class FakeCall:
    """As much of a call as grpc_status reads."""

    def __init__(self, sent: Any) -> None:
        self._sent = sent

    def trailing_metadata(self) -> Any:
        return self._sent.trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._sent.code

    def details(self) -> str:
        return self._sent.details


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_is_the_grpc_code_of_its_name(kind: Kind) -> None:
    error = FarmError("x")
    error.kind = kind
    assert status.to_status(error).code is grpc.StatusCode[kind.value]


def plain(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def test_a_server_that_does_not_answer_is_named_with_what_to_check() -> None:
    error = status.from_rpc_error(plain(grpc.StatusCode.UNAVAILABLE, "refused\nmore"), server="board:1")
    assert (error.reason, error.kind, error.fault) == ("SERVER_UNREACHABLE", Kind.UNAVAILABLE, Fault.FARM)
    assert error.message == "The server at board:1 does not answer: refused."
    assert "--server" in error.remedy and "--tls-ca" in error.remedy


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_status_without_our_details_is_an_error_too(code: grpc.StatusCode) -> None:
    error = status.from_rpc_error(plain(code, "said"), server="there")
    assert isinstance(error, EtfarmError)
    assert error.reason
    known = Kind.UNAVAILABLE if code is grpc.StatusCode.CANCELLED else Kind.__members__.get(code.name, Kind.INTERNAL)
    assert error.kind is known


def test_a_call_that_grpc_cancelled_at_the_server_is_unanswered_unlike_one_that_the_server_refused() -> None:
    error = status.from_rpc_error(plain(grpc.StatusCode.CANCELLED, "CANCELLED"), server="board:1")
    assert (error.reason, error.kind, error.fault) == ("SERVER_UNREACHABLE", Kind.UNAVAILABLE, Fault.FARM)
    assert status.is_unanswered(plain(grpc.StatusCode.CANCELLED)) and status.is_unanswered(plain(grpc.StatusCode.UNAVAILABLE))
    refused = rpc_error(status.to_status(error_of(Fault.USER, "CANCELLED", "Job 1 was cancelled.", kind=Kind.CANCELLED)))
    assert not status.is_unanswered(refused) and not status.is_unanswered(plain(grpc.StatusCode.INTERNAL))


def test_details_of_another_domain_are_not_taken_for_ours() -> None:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUOTA", domain="proxy.example"))
    sent = rpc_status.to_status(status_pb2.Status(code=8, message="too much", details=[detail]))
    assert status.from_rpc_error(rpc_error(sent), server="there").reason == "RESOURCE_EXHAUSTED"


def test_an_error_without_a_fault_is_a_farm_error() -> None:
    assert status.from_proto(common_pb2.Error(message="x")).fault is Fault.FARM


@asynccontextmanager
async def failing(error: EtfarmError) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """A server with one rpc, which answers `error`."""

    async def answer(request: bytes, context: Any) -> bytes:
        await context.abort_with_status(status.to_status(error))
        raise AssertionError

    handler = grpc.method_handlers_generic_handler("test.Service", {"Fail": grpc.unary_unary_rpc_method_handler(answer)})
    async with serving(handler, options=SERVER_OPTIONS) as address, open_channel(Access(address)) as channel:
        yield lambda: channel.unary_unary("/test.Service/Fail")(b"")


@pytest.mark.parametrize("length", [10, 20_000, 2_000_000])
async def test_a_long_sentence_arrives_with_its_reason(length: int) -> None:
    error = error_of(
        Fault.USER,
        "LONG",
        "😀" * length,
        "b" * length,
        kind=Kind.NOT_FOUND,
        metadata={f"of_{n}": "😀" * length for n in range(9)},
    )
    async with failing(error) as call:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call()
    got = status.from_rpc_error(failed.value, server="there")
    assert (got.fault, got.reason, got.kind) == (Fault.USER, "LONG", Kind.NOT_FOUND)
    assert got.message.startswith("😀" * 10) and got.remedy.startswith("b" * 10)
