"""The interceptor of every rpc: it authenticates and authorizes callers, checks requests, and turns errors into statuses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final, NoReturn

import grpc
import structlog
from grpc.aio import ServicerContext

from etfarm.server.access.audit import AuditLog
from etfarm.server.access.tokens import Credential
from etfarm.server.rpc.door import admission
from etfarm.server.rpc.door.auditing import Auditor, entry_of, rpc_of
from etfarm.server.rpc.door.authentication import Authentication
from etfarm.server.rpc.door.caller import Resolve, enter, resolve_default
from etfarm.server.rpc.door.calls import Call, Calls, is_read
from etfarm.server.rpc.door.connections import Connections
from etfarm.server.rpc.door.failures import Allowance, Failures, address_of
from etfarm.server.rpc.door.forwarded import KEY, Forwarded, accept, is_question
from etfarm.server.rpc.door.proving import Prover
from etfarm.server.rpc.door.roles import PROOF
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.v1.common_pb2 import Principal
from etfarm.wire.errors import EtfarmError, FarmError, Kind
from etfarm.wire.names import PROJECT_METADATA
from etfarm.wire.status import to_status

log = structlog.get_logger()


Ask = Callable[[EtfarmError, str, ServicerContext[Any, Any]], Awaitable[Credential]]
"""Function that takes a refusal, the method and the context of its call, and returns the credential of the caller if the leader
admits it; it raises the leader's refusal otherwise. It must read no message."""

PROOFS: Final = 64
PROOFS_A_SECOND: Final = 20.0
"""Number of questions for a proof that are answered during a flood, and the rate of further ones."""


class AuthErrorInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor that determines the principal of every call, and turns every error into a status.

    Authentication and authorization only need the call's metadata. The messages of a refused call are neither received nor
    decoded, so callers without a token use no memory.
    """

    def __init__(
        self,
        tokens: Authentication,
        resolve: Resolve = resolve_default,
        *,
        audit: AuditLog | None = None,
        connections: Connections | None = None,
        clock: Callable[[], float] = time.monotonic,
        forwarded: Forwarded | None = None,
        ask: Ask | None = None,
        prover: Prover | None = None,
    ) -> None:
        """Initialize the interceptor.

        Args:
            tokens: the source of credentials.
            resolve: adds projects to a principal.
            audit: records changes and refusals.
            connections: closes connections without a valid token.
            clock: returns seconds on a monotonic clock.
            forwarded: recognizes callers of calls that other servers forward.
            ask: asks the farm's leader about a caller whom this server would refuse. All handlers must be of streams, so that
                nothing is read before the answer.
            prover: answers GetProof, whoever calls.
        """
        self._tokens = tokens
        self._resolve = resolve
        self._audit = audit
        self._connections = connections
        close = (lambda peer: None) if connections is None else connections.end
        self.calls = Calls(tokens.is_valid, resolve, clock=clock, close=close)
        self._failures = Failures(clock)
        self._large = FairSlots(admission.AT_ONCE)
        self._forwarded = forwarded or Forwarded()
        self._ask = ask
        self._prover = prover
        self._proofs = Allowance(PROOFS, PROOFS_A_SECOND, clock)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        metadata = handler_call_details.invocation_metadata
        principal: Principal | None = None
        forwarded_peer = self._forwarded.peer(metadata)
        if method == PROOF and self._prover is not None:
            return self._proof(self._prover, metadata)
        try:
            credential = self._tokens.authenticate(_text(metadata, "authorization"))
            principal = credential.principal
            structlog.contextvars.bind_contextvars(principal=principal.name)
            requested = _text(metadata, PROJECT_METADATA) or ""
            principal = self._resolve(principal, requested)
            # The same task runs the handler, which therefore sees the caller in the context variables.
            enter(credential, principal, method, names_project=bool(requested))
            if forwarded_peer is not None and is_question(metadata):
                return grpc.stream_stream_rpc_method_handler(accept)
            call = self.calls.begin(method, credential, principal)
            await self._take_turn(call)
        except EtfarmError as error:
            if self._ask is not None:
                return self._question(self._ask, error, handler, method, forwarded_peer)
            return self._refusal(error, method, principal, forwarded_peer)
        return self._admission(handler, call, forwarded_peer)

    def _proof(self, prover: Prover, metadata: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of GetProof. It handles streams, as that of a refusal does."""

        async def prove(requests: object, context: ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            try:
                proof = await prover.prove(metadata)
            except EtfarmError as error:
                await _abort(context, error, PROOF)
            yield proof.SerializeToString()

        return grpc.stream_stream_rpc_method_handler(prove)

    async def _take_turn(self, call: Call) -> None:
        """Let a call that reads wait for its turn; methods with many responses have none of these names."""
        if is_read(call.method):
            await self.calls.take_turn(call)

    def _admission(
        self, handler: grpc.RpcMethodHandler[Any, Any], call: Call, forwarded_peer: str | None = None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that admits a call of a known caller to the given one."""
        method, credential = call.method, call.credential
        # A call that is forwarded ends with the one to the leader. One that is cancelled while it sends gets no status.
        call.is_stream = handler.response_streaming and handler.request_deserializer is not None

        def admit(context: ServicerContext[Any, Any]) -> Auditor | None:
            peer = context.peer()
            # The connection of a server of the farm has calls of others, too.
            call.peer = peer if forwarded_peer is None else ""
            if self._connections is not None and credential.key:
                self._connections.trust(peer)
            return (
                None if self._audit is None else Auditor(self._audit, method, call.principal, address_of(forwarded_peer or peer))
            )

        kind = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        wrap = _streaming if handler.response_streaming else _single
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        if handler.request_deserializer is None:
            return grpc.stream_stream_rpc_method_handler(_forwarding(handler.stream_stream, admit, call))
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(getattr(handler, kind), admit, call, partial(admission.admitted, turns=self._large, whose=call.principal.name)),
            request_deserializer=admission.deserializer(method, handler.request_deserializer),
            response_serializer=self.calls.sending(call, handler.response_serializer or bytes),
        )
        return wrapped

    def has_token(self, metadata: Any) -> bool:
        """Return whether the metadata of a call contain a valid token, or are those of a server of the farm.

        Callers need a token here.
        """
        header = _text(metadata, "authorization")
        if header is None and _text(metadata, KEY) is None:
            return False  # a flood has many of these: the error would take most of the time
        try:
            self._tokens.authenticate(header)
        except EtfarmError:
            return self._forwarded.peer(metadata) is not None
        return True

    def is_urgent(self, method: str, context: Any) -> bool:
        """Return whether a call without a token is not to be dropped during a flood: an agent cannot send its token before.

        A hint is no secret, so that only some of these calls are urgent.
        """
        if method != PROOF or self._prover is None:
            return False
        return self._prover.knows(context.invocation_metadata()) and self._proofs.take()

    def _refusal(
        self, error: EtfarmError, method: str, principal: Principal | None, forwarded_peer: str | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that refuses the call. It handles streams, since gRPC then reads no message that is not requested."""

        async def refuse(requests: object, context: ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            await self._refuse(context, error, method, principal, forwarded_peer)
            yield b""

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _refuse(
        self,
        context: ServicerContext[Any, Any],
        error: EtfarmError,
        method: str,
        principal: Principal | None = None,
        forwarded_peer: str | None = None,
    ) -> NoReturn:
        address = address_of(forwarded_peer or context.peer())
        if error.kind is Kind.UNAUTHENTICATED and (wait_s := self._failures.note(address)) > 0:
            error.metadata["retry_after_s"] = f"{wait_s:.0f}"
            # The connection of a server of the farm has calls of others, too.
            if self._connections is not None and forwarded_peer is None and self._failures.is_flood(address):
                self._connections.distrust(context.peer())
        if self._audit is not None:
            self._audit.refuse(entry_of(rpc_of(method), error.reason, principal, address))
        await _abort(context, error, method)

    def _question(
        self, ask: Ask, error: EtfarmError, handler: grpc.RpcMethodHandler[Any, Any], method: str, forwarded_peer: str | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that asks the leader about the caller, and goes on as it decides."""

        async def decide(requests: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                credential = await ask(error, method, context)
                call = self.calls.begin(method, credential, credential.principal)
                await self._take_turn(call)
            except EtfarmError as refusal:
                await self._refuse(context, refusal, method, forwarded_peer=forwarded_peer)
            behavior: Any = self._admission(handler, call, forwarded_peer).stream_stream
            async for message in behavior(requests, context):
                yield message

        return grpc.stream_stream_rpc_method_handler(
            decide,
            request_deserializer=handler.request_deserializer and admission.deserializer(method, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )


def _text(metadata: Any, key: str) -> str | None:
    value = next((value for name, value in metadata or () if name == key), None)
    return value.decode(errors="replace") if isinstance(value, bytes) else value


Admit = Callable[[ServicerContext[Any, Any]], Auditor | None]


Check = Callable[[Any], Awaitable[Any]]


def _forwarding(behavior: Any, admit: Admit, call: Call) -> Callable[..., AsyncIterator[Any]]:
    """Return the handler of encoded messages, which only go to the leader: it checks and audits the call, and ends it.

    Args:
        behavior: gets the call, which writes the responses, instead of the requests.
    """

    async def forward(requests: object, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await _start(context, call)
        admit(context)
        try:
            await behavior(call, context)
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - outermost handler: every error becomes a status
            await _fail(context, error, call, None)
        call.is_handled = False
        return
        yield

    return forward


def _single(behavior: Callable[..., Any], admit: Admit, call: Call, check: Check) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: ServicerContext[Any, Any]) -> Any:
        await _start(context, call)
        auditor = admit(context)
        try:
            admitted = await check(request)
            if auditor is not None:
                auditor.examine(admitted)
            answered = await _awaited(behavior(admitted, context))
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - outermost handler: every error becomes a status
            await _fail(context, error, call, auditor)
        call.is_handled = False
        if auditor is not None:
            auditor.succeeded(answered)
        return answered

    return answer


def _streaming(behavior: Callable[..., Any], admit: Admit, call: Call, check: Check) -> Callable[..., AsyncIterator[Any]]:
    async def answer(request: Any, context: ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await _start(context, call)
        auditor = admit(context)

        async def abort(error: EtfarmError) -> None:
            with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, asyncio.InvalidStateError):
                await context.abort_with_status(to_status(error))

        try:
            admitted = await check(request)
            if auditor is not None:
                auditor.examine(admitted)
            answers = behavior(admitted, context)
            if asyncio.iscoroutine(answers):  # a handler that writes its responses itself, such as that of health checks
                await answers
                return
            async for message in answers:
                if auditor is not None:
                    auditor.succeeded(message)
                call.abort_sending = abort
                yield message
                call.abort_sending = call.unread_since_s = None
            call.is_handled = False
            if auditor is not None:
                auditor.succeeded()
        except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 - outermost handler: every error becomes a status
            await _fail(context, error, call, auditor)

    return answer


async def _start(context: ServicerContext[Any, Any], call: Call) -> None:
    """Permit cancellation of the call from now on; end it here if that was requested while gRPC received the request."""
    call.is_handled = True
    if call.ending is not None:
        await _abort(context, call.ending, call.method)


async def _fail(context: ServicerContext[Any, Any], error: BaseException, call: Call, auditor: Auditor | None) -> NoReturn:
    """End a call whose handler raised: with the error's status, as cancelled, or with the reason why the server ended it."""
    call.is_handled = False
    if auditor is not None:
        auditor.failed(
            error.reason if isinstance(error, EtfarmError) else "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
        )
    if isinstance(error, asyncio.CancelledError) and call.ending is not None:
        await _abort(context, call.recover(), call.method)
    if isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError)):
        raise error
    assert isinstance(error, Exception)
    await _abort(context, error, call.method)


async def _awaited(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


async def _abort(context: ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    if not isinstance(error, EtfarmError):
        log.exception("an rpc failed because of a bug", method=method)
        request = structlog.contextvars.get_contextvars().get("request", "")
        where = f", with request={request}" if request else ""
        error = FarmError(f"etfarm has a bug: {error!r}.", f"The server's log has the traceback{where}.")
    await context.abort_with_status(to_status(error))
    raise AssertionError("abort raises")
