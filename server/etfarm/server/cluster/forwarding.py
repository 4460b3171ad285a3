"""Forwarding of calls to the leading server: bytes pass as they are, in both directions, one message at a time.

Callers take turns to have a message in this process, so that large messages of many calls are not there at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import grpc
import structlog
from grpc.aio import ServicerContext

from etfarm.server.access.tokens import Credential, Unauthenticated, key_of
from etfarm.server.cluster.errors import NoLeader
from etfarm.server.cluster.known_tokens import StandbyAuthentication
from etfarm.server.cluster.leadership import Leader
from etfarm.server.cluster.links import Link, Links
from etfarm.server.rpc.door.calls import Call
from etfarm.server.rpc.door.failures import address_of
from etfarm.server.rpc.door.forwarded import ACCEPTED, KEY, PEER, QUESTION, Forwarded, forwarded_metadata
from etfarm.server.rpc.door.token_file import sent_key
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.authority import network_of
from etfarm.wire.errors import EtfarmError, Kind, error_for
from etfarm.wire.status import from_rpc_error

log = structlog.get_logger()

_OWN_METADATA: Final = frozenset({PEER, KEY, QUESTION, "user-agent", "content-type", "te", "accept-encoding"})
"""Metadata of a call that is not passed on: gRPC's own, and what only servers may send."""

_SMALL_BYTES: Final = 64 << 10
"""Maximum size of messages that callers may have in this process without a turn."""

_QUESTIONS_AT_ONCE: Final = 8
_QUESTIONS_OF_AN_ADDRESS: Final = 64
_MOST_QUESTIONS: Final = 1024
"""Numbers of calls by unknown callers about which the leader is asked at a time, and which wait for that."""

_Call = grpc.aio.StreamStreamCall[bytes, bytes]
_Metadata = tuple[tuple[str, str | bytes], ...]
_Trailers = tuple[Any, ...]
_Context = ServicerContext[bytes, bytes]
AT_ONCE: Final = 4
"""Number of messages of one owner that are received and passed on at a time."""
SLOW: Final = 4
"""Number of further messages of one owner, of those that have taken longer than `SLOW_S`: links may be slow or dead."""
SLOW_S: Final = 0.5
ALL: Final = 64
"""Number of messages of all owners. No account has more than it leaves to others: a half, if it is alone."""
LIMIT_S: Final = 120.0
"""Time limit of one message."""


class Forwarding:
    """The calls that a standby forwards.

    gRPC reads a message only when it is asked to, and a write waits for the peer's flow control: a slow reader at one end slows
    down the writer at the other, and no more than a message of each direction is in this process. Messages that may be large are
    received in turns.

    Args:
        links: connections to the leader.
        authentication: the callers that this server knows itself.
        on_ended: called at the end of each call with its method and the name of its code.
        on_refused: called when the leader has refused a call without a valid token.
        forwarded: recognizes calls of this server's web page.
    """

    def __init__(
        self,
        links: Links,
        authentication: StandbyAuthentication,
        on_ended: Callable[[str, str], None] = lambda method, code: None,
        on_refused: Callable[[], None] = lambda: None,
        forwarded: Forwarded | None = None,
    ) -> None:
        self._links = links
        self._authentication = authentication
        self._on_ended = on_ended
        self._on_refused = on_refused
        self._forwarded = forwarded or Forwarded()
        self._requests, self._uploads = Turns(), Turns()
        self._questions = FairSlots(_QUESTIONS_AT_ONCE)
        self._asking: dict[str, int] = {}

    def handler(
        self, method: str, *, streams_requests: bool, streams_responses: bool, suffix: bytes = b""
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method. On the wire, a single message is a stream of one, so streams serve all kinds.

        gRPC would receive the message of a unary handler before the caller is known.

        Args:
            suffix: an encoded message with fields to add to the response, if requests and responses are single messages.
        """
        if streams_requests or streams_responses:
            forward = partial(self._forward_stream, method, streams_requests, streams_responses)
        else:
            forward = partial(self._forward_unary, method, suffix)
        return grpc.stream_stream_rpc_method_handler(forward)

    async def ask(self, refusal: EtfarmError, method: str, context: _Context) -> Credential:
        """Ask the leader whether it admits a caller whom this server refuses, by a call without messages; return its credential.

        The token may be so new that this server has not read it yet. The leader records what it refuses.

        Raises:
            EtfarmError: the refusal of this server or of the leader, or there is no leader to ask.
        """
        header = next((value for name, value in context.invocation_metadata() or () if name == "authorization"), None)
        if refusal.kind not in (Kind.UNAUTHENTICATED, Kind.PERMISSION_DENIED):
            raise refusal
        is_certain = self._authentication.is_certain and (header is None or refusal.kind is Kind.PERMISSION_DENIED)
        if is_certain and not self._links.can_forward:
            raise refusal
        address = network_of(address_of(self._peer(context)))
        # Without a token, the leader only records the refusal: its audit log counts equal entries together.
        most = 1 if is_certain and header is None else _QUESTIONS_OF_AN_ADDRESS
        if self._asking.get(address, 0) >= most or sum(self._asking.values()) >= _MOST_QUESTIONS:
            if is_certain:
                raise refusal
            raise NoLeader("Too many calls with unknown tokens wait for the leader's answer.", "Try again.")
        self._asking[address] = self._asking.get(address, 0) + 1
        try:
            async with self._questions.take(address):
                if isinstance(header, str) and isinstance(refusal, Unauthenticated):
                    with contextlib.suppress(Unauthenticated):  # the token may have been read while the call waited
                        return self._authentication.authenticate(header)
                await self._require_accepted(refusal, method, context)
        except NoLeader:
            if is_certain:
                raise refusal from None
            raise
        finally:
            self._asking[address] -= 1
            if not self._asking[address]:
                del self._asking[address]
        # Without a header, the leader has a farm without tokens, which this server could not read.
        key = sent_key(header) if isinstance(header, str) and header.startswith("Bearer ") else key_of("")
        return Credential(key, "", Principal(name=self._owner(context)))

    async def _require_accepted(self, refusal: EtfarmError, method: str, context: _Context) -> None:
        async with self._take(context) as (link, leader):
            metadata = (*self._metadata(context, leader), (QUESTION, "1"))
            call: _Call = link.channel.stream_stream(method)(metadata=metadata, timeout=self._links.wait_s)
            try:
                await call.done_writing()
                await call.read()
                trailers, code = tuple(await call.trailing_metadata() or ()), await call.code()
            except grpc.aio.AioRpcError as error:
                if _is_from_here(error):
                    raise _lost(leader) from None
                raise from_rpc_error(error, server=leader.address) from None
            except asyncio.CancelledError:
                if link.is_closed and not _is_cancelled():
                    raise _lost(leader) from None
                raise
            finally:
                call.cancel()
        if code is not grpc.StatusCode.OK or (ACCEPTED, "1") not in trailers:
            raise refusal

    @contextlib.asynccontextmanager
    async def _take(self, context: _Context) -> Any:
        metadata = context.invocation_metadata() or ()
        if any(name == KEY for name, _ in metadata) and self._forwarded.peer(metadata) is None:  # not of this server's page
            raise NoLeader("This server no longer leads the farm.", "Try again; the server that leads now answers.")
        async with self._links.take() as taken:
            yield taken

    async def _forward_unary(self, method: str, suffix: bytes, caller: Call, context: _Context) -> None:
        async with contextlib.AsyncExitStack() as turn:
            await turn.enter_async_context(self._requests.take(*self._sharers(context)))
            request: Any = await context.read()
            if not isinstance(request, bytes):
                return  # the caller has left
            if is_small := len(request) <= _SMALL_BYTES:
                await turn.aclose()

            async def exchange(link: Link, metadata: _Metadata) -> _Trailers:
                nonlocal request
                call: Any
                if is_small:
                    call = link.channel.unary_unary(method)(request, metadata=metadata, timeout=context.time_remaining())
                else:
                    call = link.channel.stream_unary(method)(metadata=metadata, timeout=context.time_remaining())
                try:
                    if not is_small:
                        await call.write(request)
                        await call.done_writing()
                        request = None
                        await turn.aclose()
                    response = await call
                    if initial := tuple(await call.initial_metadata()):
                        await context.send_initial_metadata(initial)
                    await caller.write(context, response + suffix)
                    return tuple(await call.trailing_metadata())
                finally:
                    call.cancel()

            await self._exchange(method, context, exchange)

    async def _forward_stream(
        self, method: str, streams_requests: bool, streams_responses: bool, caller: Call, context: _Context
    ) -> None:
        async def exchange(link: Link, metadata: _Metadata) -> _Trailers:
            call: _Call = link.channel.stream_stream(method)(metadata=metadata, timeout=context.time_remaining())
            answered = asyncio.Event()
            turns, sharers = self._requests if streams_responses else self._uploads, self._sharers(context)

            async def send() -> None:
                # Once the call has ended, its status says why, and no more requests are read.
                with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    async with turns.take(*sharers):
                        is_open = await _pass_on(context, call)
                    if streams_requests and streams_responses:
                        # A dialogue, whose later messages come at any time: the leader accepts it by its first response.
                        await answered.wait()
                    while is_open and streams_requests:
                        async with contextlib.nullcontext() if streams_responses else turns.take(*sharers):
                            is_open = await _pass_on(context, call)
                    await call.done_writing()

            sending = asyncio.create_task(send(), name="forwarded requests")
            sending.add_done_callback(lambda task: task.cancelled() or task.exception() is None or call.cancel())
            try:
                await context.send_initial_metadata(tuple(await call.initial_metadata()))
                while (response := await call.read()) is not grpc.aio.EOF:
                    answered.set()
                    assert isinstance(response, bytes)
                    await caller.write(context, response)
                return tuple(await call.trailing_metadata())
            except asyncio.CancelledError:
                if sending.done() and not sending.cancelled() and (error := sending.exception()) is not None:
                    raise error from None
                raise
            finally:
                call.cancel()
                sending.cancel()
                await asyncio.wait({sending})

        await self._exchange(method, context, exchange)

    async def _exchange(
        self, method: str, context: _Context, exchange: Callable[[Link, _Metadata], Awaitable[_Trailers]]
    ) -> None:
        """Make one call to the leader, and end the caller's call as that one ends."""
        code, details, trailers = grpc.StatusCode.OK, "", ()
        try:
            async with self._take(context) as (link, leader):
                try:
                    trailers = await exchange(link, self._metadata(context, leader))
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
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError) as error:
            self._on_ended(method, grpc.StatusCode.CANCELLED.name)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise asyncio.CancelledError from None  # the caller has left while something was sent to it
        self._on_ended(method, code.name)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self._on_refused()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, details, trailers)
        context.set_trailing_metadata(trailers)

    def _owner(self, context: _Context) -> str:
        """Return who shares turns: callers at one address with one token."""
        header = next((value for name, value in context.invocation_metadata() or () if name == "authorization"), "")
        return f"{network_of(address_of(self._peer(context)))} {key_of(str(header)).hex()}"

    def _sharers(self, context: _Context) -> tuple[str, str]:
        """Return who shares turns: the owner at one address, and the principal at all of them; the owner without a token."""
        owner = self._owner(context)
        header = next((value for name, value in context.invocation_metadata() or () if name == "authorization"), None)
        if not isinstance(header, str):
            return owner, owner
        try:
            credential = self._authentication.authenticate(header)
        except Unauthenticated:  # the leader knows the token
            return owner, key_of(header).hex()
        return owner, credential.principal.name if credential.key else owner

    def _peer(self, context: _Context) -> str:
        """Return gRPC's name of the caller's connection: for a call of this server's page that of its visitor."""
        return self._forwarded.peer(context.invocation_metadata()) or context.peer()

    def _metadata(self, context: _Context, leader: Leader) -> _Metadata:
        """Return the metadata of the call to the leader.

        Raises:
            BAD_METADATA: gRPC receives such metadata and does not send them: a call with them would neither start nor end.
        """
        sent = [
            (name, value)
            for name, value in context.invocation_metadata() or ()
            if name not in _OWN_METADATA and not name.startswith(("grpc-", ":"))
        ]
        for name, value in sent:
            if not name.endswith("-bin") and not (isinstance(value, str) and value.isascii() and value.isprintable()):
                raise error_for(
                    "BAD_METADATA",
                    f"The metadata {name!r} of the call has a value beyond printable ASCII.",
                    "Send binary values as NAME-bin.",
                    name=name,
                )
        return (*sent, *forwarded_metadata(self._peer(context), leader.secret))


async def _pass_on(context: _Context, call: _Call) -> bool:
    """Pass one request on; return False at the end of the caller's requests."""
    request = await context.read()
    if not isinstance(request, bytes):
        return False
    await call.write(request)
    return True


def _is_from_here(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC itself ended the call to the leader, whose own statuses have details.

    gRPC's server cancels the calls that are open when it stops.
    """
    code, details = error.code(), error.details() or ""
    # grpc.aio loses a status that arrives while the first message is sent.
    is_lost = code is grpc.StatusCode.INTERNAL and details.startswith("Internal error from Core")
    return (is_lost or code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)) and not error.trailing_metadata()


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


class Turns:
    """The turns of all callers. gRPC does not reveal the size of a message before it has been received, so each counts alike."""

    def __init__(self, slow_s: float = SLOW_S, limit_s: float = LIMIT_S) -> None:
        self._slow_s, self._limit_s = slow_s, limit_s
        self._all = FairSlots(ALL, keeps_room=True)
        self._owners: dict[str, asyncio.Semaphore] = {}
        self._calls: Counter[str] = Counter()
        self._slow: Counter[str] = Counter()

    @asynccontextmanager
    async def take(self, owner: str, account: str = "") -> AsyncIterator[None]:
        """Hold a turn while a message is received and passed on.

        Args:
            account: who shares the turns of all with other accounts, at all of its addresses; the owner by default.

        Raises:
            MESSAGE_OVERDUE: it takes too long.
        """
        self._calls[owner] += 1
        turns, is_lent = self._owners.setdefault(owner, asyncio.Semaphore(AT_ONCE)), False

        def lend() -> None:
            nonlocal is_lent
            if self._slow[owner] < SLOW:
                self._slow[owner] += 1
                is_lent = True
                turns.release()

        try:
            await turns.acquire()
            lending = asyncio.get_running_loop().call_later(self._slow_s, lend)
            try:
                async with self._all.take(account or owner), asyncio.timeout(self._limit_s):
                    yield
            except TimeoutError:
                raise error_for(
                    "MESSAGE_OVERDUE",
                    f"A message of the call did not arrive within {self._limit_s:g} s.",
                    "Try again over a faster connection.",
                    limit_s=self._limit_s,
                ) from None
            finally:
                lending.cancel()
                if is_lent:
                    self._slow[owner] -= 1
                else:
                    turns.release()
        finally:
            self._calls[owner] -= 1
            if not self._calls[owner]:
                del self._calls[owner], self._owners[owner]
                self._slow.pop(owner, None)
