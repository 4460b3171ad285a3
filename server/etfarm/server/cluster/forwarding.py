"""Forwarding of calls to the leading server: bytes pass as they are, in both directions, one message at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
import structlog
from grpc.aio import ServicerContext

from etfarm.server.cluster.errors import NoLeader
from etfarm.server.cluster.leadership import Leader
from etfarm.server.cluster.links import Link, Links
from etfarm.server.rpc.door.forwarded import KEY, PEER, Forwarded, forwarded_metadata
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import to_status

log = structlog.get_logger()

_OWN_METADATA: Final = frozenset({PEER, KEY, "user-agent", "content-type", "te", "accept-encoding"})
"""Metadata of a call that is not passed on: gRPC's own, and what only servers may send."""

_Call = grpc.aio.StreamStreamCall[bytes, bytes]
_Metadata = tuple[tuple[str, str | bytes], ...]
_Trailers = tuple[Any, ...]


class Forwarding:
    """The calls that a standby forwards.

    gRPC reads a message only when it is asked to, and a write waits for the peer's flow control: a slow reader at one end slows
    down the writer at the other, and no more than a message of each direction is in this process.

    Args:
        links: connections to the leader.
        on_accepted: called with gRPC's name of a caller's connection once the leader has accepted a call over it.
        on_ended: called at the end of each call with its method and the name of its code.
    """

    def __init__(
        self,
        links: Links,
        on_accepted: Callable[[str], None] = lambda peer: None,
        on_ended: Callable[[str, str], None] = lambda method, code: None,
    ) -> None:
        self._links = links
        self._on_accepted = on_accepted
        self._on_ended = on_ended
        self.has_seen_refusal = False
        """Whether the leader has refused a call without a valid token."""

    def handler(self, method: str, *, is_unary: bool, suffix: bytes = b"") -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method. On the wire, a single message is a stream of one, so streams serve all kinds.

        Args:
            is_unary: whether request and response are single messages, which take fewer steps.
            suffix: an encoded message with fields to add to each response.
        """
        if is_unary:
            return grpc.unary_unary_rpc_method_handler(partial(self._forward_unary, method, suffix))
        return grpc.stream_stream_rpc_method_handler(partial(self._forward_stream, method))

    async def _forward_unary(self, method: str, suffix: bytes, request: bytes, context: ServicerContext[bytes, bytes]) -> bytes:
        response = b""

        async def exchange(link: Link, metadata: _Metadata) -> _Trailers:
            nonlocal response
            make: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = link.channel.unary_unary(method)
            call = make(request, metadata=metadata, timeout=context.time_remaining())
            try:
                await context.send_initial_metadata(tuple(await call.initial_metadata()))
                response = await call
                return tuple(await call.trailing_metadata())
            finally:
                call.cancel()

        await self._exchange(method, context, exchange)
        return response + suffix

    async def _forward_stream(self, method: str, _: object, context: ServicerContext[bytes, bytes]) -> None:
        peer = context.peer()

        async def exchange(link: Link, metadata: _Metadata) -> _Trailers:
            call: _Call = link.channel.stream_stream(method)(metadata=metadata, timeout=context.time_remaining())
            sending = asyncio.create_task(_send(context, call), name="forwarded requests")
            try:
                await context.send_initial_metadata(tuple(await call.initial_metadata()))
                is_accepted = False
                while (response := await call.read()) is not grpc.aio.EOF:
                    if not is_accepted:
                        is_accepted = True
                        self._on_accepted(peer)
                    assert isinstance(response, bytes)
                    await context.write(response)
                return tuple(await call.trailing_metadata())
            finally:
                call.cancel()
                sending.cancel()
                await asyncio.wait({sending})

        await self._exchange(method, context, exchange)

    async def _exchange(
        self,
        method: str,
        context: ServicerContext[bytes, bytes],
        exchange: Callable[[Link, _Metadata], Awaitable[_Trailers]],
    ) -> None:
        """Make one call to the leader, and end the caller's call as that one ends."""
        code, details, trailers, peer = grpc.StatusCode.OK, "", (), context.peer()
        try:
            if any(name == KEY for name, _ in context.invocation_metadata() or ()):
                raise NoLeader("This server no longer leads the farm.", "Try again; the server that leads now answers.")
            async with self._links.take() as (link, leader):
                try:
                    trailers = await exchange(link, _metadata(context, peer, leader))
                except grpc.aio.AioRpcError as error:
                    if _is_from_here(error):
                        raise _lost(leader) from None
                    code, details, trailers = error.code(), error.details() or "", tuple(error.trailing_metadata() or ())
                except asyncio.CancelledError:
                    if link.is_closed and not _is_cancelled():
                        raise _lost(leader) from None
                    raise
        except EtfarmError as error:
            self._on_ended(method, error.kind.value)
            await context.abort_with_status(to_status(error))
        except asyncio.CancelledError:
            self._on_ended(method, grpc.StatusCode.CANCELLED.name)
            raise
        self._on_ended(method, code.name)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self.has_seen_refusal = True
        else:
            self._on_accepted(peer)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailers)
        context.set_trailing_metadata(trailers)


def _metadata(context: ServicerContext[bytes, bytes], peer: str, leader: Leader) -> _Metadata:
    """Return the metadata of the call to the leader."""
    sent = (
        (name, value)
        for name, value in context.invocation_metadata() or ()
        if name not in _OWN_METADATA and not name.startswith(("grpc-", ":"))
    )
    return (*sent, *forwarded_metadata(Forwarded().peer(context.invocation_metadata()) or peer, leader.secret))


async def _send(context: ServicerContext[bytes, bytes], call: _Call) -> None:
    """Pass the requests on. Once the call has ended, its status says why, and no more are read."""
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        while isinstance(request := await context.read(), bytes):
            await call.write(request)
        await call.done_writing()


def _is_from_here(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC itself ended the call to the leader, whose own statuses have details."""
    code, details = error.code(), error.details() or ""
    # grpc.aio loses a status that arrives while the first message is sent.
    is_lost = code is grpc.StatusCode.INTERNAL and details.startswith("Internal error from Core")
    return (is_lost or code is grpc.StatusCode.UNAVAILABLE) and not error.trailing_metadata()


def _is_cancelled() -> bool:
    """Return whether the caller has cancelled its call, as opposed to this server the one to the leader."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _lost(leader: Leader) -> NoLeader:
    return NoLeader(
        f"The server at {leader.address}, which led the farm, was lost during the call.",
        "Try again; another one takes over within seconds.",
        address=leader.address,
    )
