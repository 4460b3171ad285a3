"""The live sessions: each holds a device with a loaded program that answers its owner's calls in order.

A session occupies its device as an attempt does. It lives as long as its owner's stream (`Sessions.open`); the answers of its
device arrive on the agent's stream (`Sessions.serve`). Sessions are not persisted: they end with the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from datetime import datetime
from typing import Any

import structlog

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.artifacts.store import Store, artifact_missing
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.single_flight import Listener
from etfarm.server.devices.errors import DeviceOffline, ReservationNotFound
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.reservations import Reservations
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.scheduling.waiting import open_to
from etfarm.server.devices.selection import select_devices
from etfarm.server.jobs.cells.requirements import Requirements, method_missing
from etfarm.server.jobs.records.quotas import Counted, Quotas
from etfarm.server.sessions.errors import ForeignStream
from etfarm.server.sessions.leasing import Leasing
from etfarm.server.sessions.session import (
    Lease,
    Session,
    bad_answer,
    limit_answer,
    lost_error,
    stored_digests,
    validate_request,
)
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import agent_pb2, compile_pb2, job_pb2, session_pb2
from etfarm.v1.session_pb2 import SessionAnswer, SessionEvent
from etfarm.wire import selectors, sessions, token_buffer
from etfarm.wire.errors import error_for
from etfarm.wire.shielding import shielded
from etfarm.wire.status import to_proto
from etfarm.wire.token_buffer import BadTokens, TokenBuffer

log = structlog.get_logger()


class Sessions:
    """The live sessions of a server."""

    def __init__(
        self,
        registry: Registry,
        runs: Runs,
        compiler: Compiler,
        store: Store,
        requirements: Requirements,
        leasing: Leasing,
        measurement_lock: MeasurementLock,
        *,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        quotas: Quotas | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        self._reservations = reservations
        self._counted = Counted("sessions_per_user", "sessions", (quotas or Quotas()).sessions_per_user)
        self._registry = registry
        self._runs = runs
        self._compiler = compiler
        self._store = store
        self._requirements = requirements
        self._leasing = leasing
        self._measurement_lock = measurement_lock
        self._now = now
        self._new_id = new_id
        self._sessions: dict[str, Session] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        """The tasks that send the sessions' events."""
        registry.on_change(self._end_lost)

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    async def open(self, request: session_pb2.OpenSessionRequest, owner: str, project: str) -> AsyncIterator[SessionEvent]:
        """Yield the events of a new session, which lives until this generator is closed or yields ENDED.

        Args:
            project: project that owns the session and the artifacts of its program.

        Raises:
            EtfarmError: before the first event; see SessionService.Open.
        """
        with self._counted.hold(owner):
            async with aclosing(self._events(request, owner, project)) as events:
                async for event in events:
                    yield event

    async def _events(self, request: session_pb2.OpenSessionRequest, owner: str, project: str) -> AsyncGenerator[SessionEvent]:
        selector = await self._check(request, project)
        facts = await self._facts(request, owner, project)
        for method in facts:
            self._requirements.find_unfit(selector, method, project)
        session = Session(self._new_id(), owner, project, request, order=(round(self._now().timestamp() * 1e9), 0))
        self._sessions[session.id] = session
        if (stream := asyncio.current_task()) is not None:
            self._streams.add(stream)
            stream.add_done_callback(self._streams.discard)
        leading = asyncio.create_task(self._leasing.lead(session, selector, facts), name=f"session-{session.id}")
        log.info("session opened", session=session.id, owner=owner)
        try:
            session.publish(SessionEvent(waiting=session_pb2.SessionWaiting()))
            while (event := await session.next_event()) is not None:
                yield event
        finally:
            del self._sessions[session.id]
            leading.cancel()
            # The remaining work frees the device: a caller that is cancelled twice must not interrupt it.
            await asyncio.shield(asyncio.ensure_future(self._discard_tensors(session, leading)))
            log.info("session ended", session=session.id)

    async def _discard_tensors(self, session: Session, leading: asyncio.Task[None]) -> None:
        """Wait for the end on the device; then delete what the calls brought into the store, unless it is used elsewhere."""
        await asyncio.wait([leading])
        await self._store.discard(session.tensors)

    def artifacts(self) -> set[str]:
        """Return the digests of the programs and tensors of live sessions, those that wait for a device included."""
        digests: set[str] = set()
        for session in self._sessions.values():
            program = session.request.program
            digests |= {program.pte.digest, *(each.digest for each in program.data.values()), *session.tensors}
        return digests

    def find(self, session_id: str, scope: Scope = EVERYTHING) -> Session:
        """Return a live session that the caller sees.

        Raises:
            SESSION_NOT_FOUND: the scope has no session with this id.
        """
        session = self._sessions.get(session_id)
        if session is None or not scope.allows(session.project):
            raise error_for(
                "SESSION_NOT_FOUND", f"There is no session {session_id!r}.", "It has ended: open another.", session=session_id
            )
        return session

    def owner_of(self, session_id: str, scope: Scope) -> str:
        """Return the owner of a session, the only user who may call it.

        Raises:
            SESSION_NOT_FOUND: the scope has no session with this id.
        """
        return self.find(session_id, scope).owner

    async def call(self, request: session_pb2.CallSessionRequest, on_queued: Callable[[], Awaitable[None]]) -> SessionAnswer:
        """Return the answer to one call. Cancelling before the call's turn withdraws the call.

        Args:
            on_queued: called once the call is queued behind earlier ones.

        Raises:
            EtfarmError: see SessionService.Call.
        """
        session = self.find(request.session_id)
        if request.task.HasField("generation"):
            raise error_for("BAD_CALL", "Call does not generate text.", "Use Generate.")
        sessions.check_task(request.task)
        input_digests = stored_digests(request.task.inputs)
        missing = [each for each in input_digests if not await self._store.is_held(each, [session.project])]
        # No await from here until the call is queued: otherwise other calls might overtake it, and the session might end.
        if session.over is not None:
            return SessionAnswer(error=to_proto(session.over))
        size = len(request.task.inputs.inline)
        lease = session.admit(request.call_id, size)
        if missing:
            raise artifact_missing(missing[0])
        session.remember(input_digests)
        self._runs.permit(lease.attempt_id, input_digests)
        begun = asyncio.Event()
        session.calls[request.call_id] = size
        call = agent_pb2.SessionCall(attempt_id=lease.attempt_id, call_id=request.call_id, task=request.task)
        exchange = self._start_exchange(session, lease, call, begun)
        exchange.add_done_callback(lambda _: session.calls.pop(request.call_id, None))
        try:
            await on_queued()
            return await shielded(exchange)
        except asyncio.CancelledError:
            if not begun.is_set():
                exchange.cancel()
            raise

    async def generate(
        self, request: session_pb2.GenerateSessionRequest, on_queued: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[session_pb2.GenerateSessionResponse]:
        """Yield the tokens of a generation and its answer. Closing before its turn withdraws it, and later stops it.

        Args:
            on_queued: called once the generation is queued behind earlier calls.

        Raises:
            EtfarmError: see SessionService.Generate.
        """
        session, call_id = self.find(request.session_id), request.call_id
        task = session_pb2.SessionTask(generation=request.generation)
        if request.HasField("timeout_s"):
            task.timeout_s = request.timeout_s
        sessions.check_task(task)
        if session.over is not None:
            yield session_pb2.GenerateSessionResponse(call_id=call_id, answer=SessionAnswer(error=to_proto(session.over)))
            return
        # The tokens count until their reader has taken them.
        size = task.ByteSize() + token_buffer.BYTES_OF_TOKEN * task.generation.tokens
        lease = session.admit(call_id, size)
        begun, buffer = asyncio.Event(), TokenBuffer(task.generation.tokens)
        session.calls[call_id] = size
        lease.texts[call_id] = buffer
        call = agent_pb2.SessionCall(attempt_id=lease.attempt_id, call_id=call_id, task=task)
        exchange = self._start_exchange(session, lease, call, begun)
        exchange.add_done_callback(lambda _: buffer.close())
        try:
            await on_queued()
            while (tokens := await buffer.take()) is not None:
                yield session_pb2.GenerateSessionResponse(call_id=call_id, tokens=tokens)
            yield session_pb2.GenerateSessionResponse(call_id=call_id, answer=await shielded(exchange))
        finally:
            lease.texts.pop(call_id, None)
            if not begun.is_set():
                exchange.cancel()
            elif not exchange.done():
                lease.outgoing.put_nowait(agent_pb2.SessionCall(attempt_id=lease.attempt_id, call_id=call_id, cancel=True))
            if exchange.done():
                session.calls.pop(call_id, None)
            else:
                exchange.add_done_callback(lambda _: session.calls.pop(call_id, None))

    def _start_exchange(
        self, session: Session, lease: Lease, call: agent_pb2.SessionCall, begun: asyncio.Event
    ) -> asyncio.Task[SessionAnswer]:
        """Send a call to the device in its turn; the task returns the answer, and sets `begun` when it is sent."""
        exchange = asyncio.create_task(self._exchange(session, lease, call, begun), name=f"call-{call.call_id}")
        session.exchanges.add(exchange)
        exchange.add_done_callback(session.exchanges.discard)
        return exchange

    async def _exchange(self, session: Session, lease: Lease, call: agent_pb2.SessionCall, begun: asyncio.Event) -> SessionAnswer:
        async with session.turn, AsyncExitStack() as stack:
            session.wake()
            stack.callback(session.rest)
            if call.task.HasField("loop") and self._registry.is_on_this_machine(lease.device.id):
                await stack.enter_async_context(self._measurement_lock.measure())
            begun.set()
            if lease.over.done():
                return SessionAnswer(error=to_proto(lease.over.result()))
            answer: asyncio.Future[SessionAnswer] = asyncio.get_running_loop().create_future()
            lease.answers[call.call_id] = answer
            lease.outgoing.put_nowait(call)
            try:
                return await answer
            finally:
                lease.answers.pop(call.call_id, None)

    async def serve(
        self, replies: AsyncIterator[agent_pb2.SessionReply], principal: str, holder: str
    ) -> AsyncIterator[agent_pb2.SessionCall]:
        """Yield the calls of a session until it ends. The agent of the principal sends `replies`.

        Args:
            holder: holder of the agent's uploads.

        Raises:
            EtfarmError: before the first call; see AgentService.ServeSession.
        """
        reader = aiter(replies)
        first = await anext(reader, None)
        if first is None or first.WhichOneof("reply") != "ready":
            raise error_for("NO_READY", "The first message of a session's stream must be `ready`.")
        session, lease = self._find_by_attempt(first.attempt_id)
        # Others may know an attempt's id, so only the agent of the device, identified by its token, may serve the attempt.
        if self._registry.session_of(lease.device.id).principal != principal:
            raise ForeignStream(f"Another agent serves the device of the attempt {first.attempt_id}.", attempt=first.attempt_id)
        if lease.served:
            raise error_for("SESSION_SERVED", f"Another stream serves the attempt {first.attempt_id}.", attempt=first.attempt_id)
        lease.served = True
        first.ready.device.CopyFrom(lease.device)
        lease.ready.set_result(first.ready)
        listening = asyncio.create_task(self._listen(session, lease, reader, holder), name=f"session-{session.id}-replies")
        try:
            while (call := await lease.outgoing.get()) is not None:
                yield call
        finally:
            listening.cancel()
            await asyncio.wait([listening])
            lease.lose()

    def exchanges(self) -> set[asyncio.Task[SessionAnswer]]:
        """Return the tasks of the calls in progress."""
        return {exchange for session in self._sessions.values() for exchange in session.exchanges}

    async def stop(self, wait_s: float) -> None:
        """End all sessions before the server stops, and wait for a limited time until their callers have the reason."""
        for session in self._sessions.values():
            error = error_for("SERVER_STOPPED", "The server stopped.", "Open another session when it is back.")
            if session.lease is not None:
                session.lease.end(error)
            else:
                session.end(error)
        if self._streams:
            await asyncio.wait(self._streams, timeout=wait_s)

    async def _check(self, request: session_pb2.OpenSessionRequest, project: str) -> selectors.Selector:
        selector = selectors.parse(request.selector)
        validate_request(request)
        program = request.program
        await self._store.require([program.pte.digest, *(artifact.digest for artifact in program.data.values())], project)
        devices = open_to(project, self._registry.devices())
        select_devices(selector, request.selector, devices)
        if request.reservation_id:
            if self._reservations is None:
                raise ReservationNotFound(request.reservation_id)
            await self._reservations.require_device(request.reservation_id, project, [request.selector], devices)
        self._requirements.require_cpus(selector, request.threads, request.cores, project)
        return selector

    async def _facts(self, request: session_pb2.OpenSessionRequest, owner: str, project: str) -> list[compile_pb2.MethodFacts]:
        """Return the requirements of the requested methods, or of all methods if none is requested."""
        candidate = job_pb2.Candidate(name="session", program=request.program)
        silent = Listener(lambda stage, duration_ms, *, cached=False: None, lambda line: None)
        outcome = await self._compiler.compile(candidate, owner=owner, project=project, fresh=False, listener=silent)
        if outcome.error is not None:
            raise outcome.error
        methods = outcome.compilation.facts.methods
        for name in request.methods:
            if name not in methods:
                raise method_missing(f"The program has no method {name!r}.", name, methods)
        return [methods[name] for name in request.methods or sorted(methods)]

    async def _listen(self, session: Session, lease: Lease, reader: AsyncIterator[agent_pb2.SessionReply], holder: str) -> None:
        """Process an agent's replies until its stream ends."""
        try:
            async for reply in reader:
                kind = reply.WhichOneof("reply")
                if kind == "answered":
                    awaited = lease.answers.get(reply.answered.call_id)
                    if awaited is None or awaited.done():
                        continue  # what it names would become the project's
                    answer = await self._take_tensors(session, limit_answer(reply.answered.answer), holder)
                    if not awaited.done():
                        awaited.set_result(answer)
                elif kind == "tokens":
                    if (buffer := lease.texts.get(reply.tokens.call_id)) is not None:
                        try:
                            buffer.put(reply.tokens.tokens)
                        except BadTokens as error:
                            lease.end(error)
                elif kind == "log_line":
                    session.publish(SessionEvent(log_line=reply.log_line))
        except Exception as error:  # noqa: BLE001 - the session is over, whatever broke the stream
            log.info("a session's stream broke", session=session.id, error=str(error))
        lease.lose()

    async def _take_tensors(self, session: Session, answer: SessionAnswer, holder: str) -> SessionAnswer:
        """Return an answer whose tensors in the store the project holds, replaced by an error if they are not there."""
        named = [each.artifact for each in (answer.outputs, answer.measured.samples) if each.HasField("artifact")]
        if not named:
            return answer
        digests = [each.digest for each in named]
        # Only artifacts that the agent uploaded count, not any digest that it names, since the session deletes them at its end.
        session.remember(await self._store.find_held(digests, [holder]))
        held = await self._store.find_held(digests, [holder, session.project])
        sizes = await self._store.sizes(list(held), for_now=True)
        for each in named:
            if sizes.get(each.digest) != each.size_bytes:
                return bad_answer(f"the artifact {each.digest[:12]} of {each.size_bytes} bytes, which its agent did not upload")
        await self._store.hold(session.project, digests, session.owner, for_now=True)
        return answer

    def _find_by_attempt(self, attempt_id: str) -> tuple[Session, Lease]:
        for session in self._sessions.values():
            if session.lease is not None and session.lease.attempt_id == attempt_id and not session.lease.gone.done():
                return session, session.lease
        raise error_for("SESSION_NOT_FOUND", f"No session waits for the attempt {attempt_id!r}.", attempt=attempt_id)

    def _end_lost(self) -> None:
        """End the sessions whose devices are no longer connected."""
        for session in self._sessions.values():
            if session.lease is not None and not session.lease.over.done() and not self._is_served(session.lease):
                session.lease.end(lost_error(session.lease))

    def _is_served(self, lease: Lease) -> bool:
        try:
            self._registry.session_of(lease.device.id)
        except DeviceOffline:
            return False
        return True
