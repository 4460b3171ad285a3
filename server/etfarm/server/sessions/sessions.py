"""Sessions: leases on devices, each with a loaded program that answers its owner's calls in order.

A session occupies its device as an attempt does. It lives as long as its owner's stream (`Sessions.open`), and what its
device answers comes on the agent's stream (`Sessions.serve`). Nothing of it is written down: a server that ends, ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from datetime import datetime
from typing import Any, Final

import structlog

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.artifacts.store import ArtifactMissing, Store
from etfarm.server.compile.compiler import Compiler
from etfarm.server.compile.single_flight import Listener
from etfarm.server.devices import schedule
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import DeviceOffline
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runners import demand_runner
from etfarm.server.devices.runs import AttemptLost, Runs
from etfarm.server.devices.schedule import Waiting
from etfarm.server.jobs.cells.execution import Execution, MethodMissing, check_device
from etfarm.server.jobs.cells.placement import Placement
from etfarm.server.jobs.records.quotas import Counted, Quotas
from etfarm.server.sessions.lease import (
    ForeignStream,
    Lease,
    NoReady,
    ServerStopped,
    Session,
    SessionLost,
    SessionServed,
    check_request,
    checked,
    lost_error,
    stored,
)
from etfarm.v1 import agent_pb2, compile_pb2, job_pb2, session_pb2
from etfarm.v1.session_pb2 import SessionAnswer, SessionEvent
from etfarm.wire import selectors, sessions
from etfarm.wire.errors import EtfarmError, FarmError, Fault
from etfarm.wire.sessions import SessionNotFound
from etfarm.wire.status import from_proto, to_proto

log = structlog.get_logger()

START_DEADLINE_S: Final = 600.0
"""For fetching and loading a program on the device."""

LAST_WORD_S: Final = 1.0
"""How long a device that stopped serving may take to say why."""

_MAX_PLACEMENTS: Final = 3


class Sessions:
    """The live sessions."""

    def __init__(
        self,
        registry: Registry,
        runs: Runs,
        placement: Placement,
        bundles: Bundles,
        compiler: Compiler,
        store: Store,
        execution: Execution,
        quiet: MeasurementLock,
        *,
        now: Callable[[], datetime],
        new_id: Callable[[], str],
        quotas: Quotas | None = None,
    ) -> None:
        self._counted = Counted("sessions_per_user", "sessions", (quotas or Quotas()).sessions_per_user)
        self._registry = registry
        self._runs = runs
        self._placement = placement
        self._bundles = bundles
        self._compiler = compiler
        self._store = store
        self._execution = execution
        self._quiet = quiet
        self._now = now
        self._new_id = new_id
        self._sessions: dict[str, Session] = {}
        registry.on_change(self._look_for_lost)

    async def open(self, request: session_pb2.OpenSessionRequest, owner: str, project: str) -> AsyncIterator[SessionEvent]:
        """The events of a new session, which lives until this generator is closed or gives ENDED.

        Args:
            project: whose session it is, and whose artifacts the program is made of.

        Raises:
            EtfarmError: before the first event, as SessionService.Open says.
        """
        with self._counted.hold(owner):
            async with aclosing(self._events(request, owner, project)) as events:
                async for event in events:
                    yield event

    async def _events(self, request: session_pb2.OpenSessionRequest, owner: str, project: str) -> AsyncGenerator[SessionEvent]:
        selector = await self._check(request, project)
        facts = await self._facts(request, owner, project)
        for method in facts:
            self._execution.unfit(selector, method, project)
        session = Session(self._new_id(), owner, project, request, order=(round(self._now().timestamp() * 1e9), 0))
        self._sessions[session.id] = session
        leading = asyncio.create_task(self._lead(session, selector, facts), name=f"session-{session.id}")
        log.info("session opened", session=session.id, owner=owner)
        try:
            session.tell(SessionEvent(waiting=session_pb2.SessionWaiting()))
            while (event := await session.next_event()) is not None:
                yield event
        finally:
            del self._sessions[session.id]
            leading.cancel()
            # What is left to do is for the device: it must not be cut short by a caller that is cancelled twice.
            await asyncio.shield(asyncio.ensure_future(self._clear(session, leading)))
            log.info("session ended", session=session.id)

    async def _clear(self, session: Session, leading: asyncio.Task[None]) -> None:
        """Waits for the end on the device; then what the calls brought into the store goes, unless it is used elsewhere."""
        await asyncio.wait([leading])
        await self._store.discard(session.tensors)

    def find(self, session_id: str, scope: Scope = EVERYTHING) -> Session:
        """A live session that the caller sees.

        Raises:
            SessionNotFound: there is none of the id in the scope.
        """
        session = self._sessions.get(session_id)
        if session is None or not scope.allows(session.project):
            raise SessionNotFound(f"There is no session {session_id!r}.", "It has ended: open another.", session=session_id)
        return session

    def owner_of(self, session_id: str, scope: Scope) -> str:
        """Who may call.

        Raises:
            SessionNotFound: there is none of the id in the scope.
        """
        return self.find(session_id, scope).owner

    async def call(self, request: session_pb2.CallRequest, taken: Callable[[], Awaitable[None]]) -> SessionAnswer:
        """One call's answer. A caller that is cancelled before its turn takes the call back.

        Args:
            taken: is called once the call has its place behind those before it.

        Raises:
            EtfarmError: as SessionService.Call says.
        """
        session = self.find(request.session_id)
        sessions.check_task(request.task)
        wanted = stored(request.task.inputs)
        missing = [each for each in wanted if not await self._store.is_held(each, [session.project])]
        # Nothing is awaited from here until the call has its place: others may come meanwhile, and the session may end.
        if session.over is not None:
            return SessionAnswer(error=to_proto(session.over))
        size = len(request.task.inputs.inline)
        lease = session.admit(request.call_id, size)
        if missing:
            raise ArtifactMissing(missing[0])
        session.remember(wanted)
        self._runs.permit(lease.attempt_id, wanted)
        begun = asyncio.Event()
        session.calls[request.call_id] = size
        exchange = asyncio.create_task(self._exchange(session, lease, request, begun), name=f"call-{request.call_id}")
        session.exchanges.add(exchange)
        exchange.add_done_callback(session.exchanges.discard)
        try:
            await taken()
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            if not begun.is_set():
                exchange.cancel()
            raise

    async def _exchange(
        self, session: Session, lease: Lease, request: session_pb2.CallRequest, begun: asyncio.Event
    ) -> SessionAnswer:
        try:
            async with session.turn, AsyncExitStack() as stack:
                session.wake()
                stack.callback(session.rest)
                if request.task.HasField("loop") and self._registry.is_on_this_machine(lease.device.id):
                    await stack.enter_async_context(self._quiet.measure())
                begun.set()
                if lease.over.done():
                    return SessionAnswer(error=to_proto(lease.over.result()))
                answer: asyncio.Future[SessionAnswer] = asyncio.get_running_loop().create_future()
                lease.answers[request.call_id] = answer
                call = agent_pb2.SessionCall(attempt_id=lease.attempt_id, call_id=request.call_id, task=request.task)
                lease.outgoing.put_nowait(call)
                try:
                    return await answer
                finally:
                    lease.answers.pop(request.call_id, None)
        finally:
            session.calls.pop(request.call_id, None)

    async def serve(
        self, replies: AsyncIterator[agent_pb2.SessionReply], principal: str, holder: str
    ) -> AsyncIterator[agent_pb2.SessionCall]:
        """The calls for a session whose agent, of this principal, sends `replies`; ends with it.

        Args:
            holder: who holds what the agent uploads.

        Raises:
            EtfarmError: before the first call, as AgentService.ServeSession says.
        """
        reader = aiter(replies)
        first = await anext(reader, None)
        if first is None or first.WhichOneof("reply") != "ready":
            raise NoReady("The first message of a session's stream is ready.")
        session, lease = self._of_attempt(first.attempt_id)
        # Attempts have ids that others can read: whoever serves one has the token of the device's own agent.
        if self._registry.session_of(lease.device.id).principal != principal:
            raise ForeignStream(f"Another agent serves the device of the attempt {first.attempt_id}.", attempt=first.attempt_id)
        if lease.served:
            raise SessionServed(f"Another stream serves the attempt {first.attempt_id}.", attempt=first.attempt_id)
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

    def stop(self) -> None:
        """Ends all sessions, for a server that ends."""
        for session in self._sessions.values():
            error = ServerStopped("The server stopped.", "Open another session when it is back.")
            if session.lease is not None:
                session.lease.end(error)
            else:
                session.end(error)

    async def _check(self, request: session_pb2.OpenSessionRequest, project: str) -> selectors.Selector:
        selector = selectors.parse(request.selector)
        check_request(request)
        program = request.program
        await self._store.require([program.pte.digest, *(artifact.digest for artifact in program.data.values())], project)
        schedule.matching(selector, request.selector, schedule.open_to(project, self._registry.devices()))
        return selector

    async def _facts(self, request: session_pb2.OpenSessionRequest, owner: str, project: str) -> list[compile_pb2.MethodFacts]:
        """What the program's methods need, those that the owner names or all of them."""
        candidate = job_pb2.Candidate(name="session", program=request.program)
        nobody = Listener(lambda stage, duration_ms, *, cached=False: None, lambda line: None)
        outcome = await self._compiler.compile(candidate, owner=owner, project=project, fresh=False, listener=nobody)
        if outcome.error is not None:
            raise outcome.error
        methods = outcome.made.facts.methods
        for name in request.methods:
            if name not in methods:
                raise MethodMissing(f"The program has no method {name!r}.", name, methods)
        return [methods[name] for name in request.methods or sorted(methods)]

    async def _lead(self, session: Session, selector: selectors.Selector, facts: list[compile_pb2.MethodFacts]) -> None:
        """A session's way from the queue to its end; the last event says why it ended, unless the owner left."""
        failed: list[str] = []
        error: EtfarmError
        try:
            while True:
                lease = await self._place(session, selector, facts, frozenset(failed))
                try:
                    error = await self._hold(session, lease, facts)
                finally:
                    self._release(session, lease)
                was_ready = lease.ready.done() and not lease.ready.cancelled()
                failed.append(lease.device.id)
                if was_ready or error.fault is not Fault.DEVICE or len(failed) == _MAX_PLACEMENTS:
                    break
                log.warning("placing a session again", session=session.id, device=lease.device.id, error=str(error))
        except EtfarmError as raised:
            error = raised
        except Exception as bug:
            log.exception("a session failed by a bug", session=session.id)
            error = FarmError(f"etfarm has a bug: {bug!r}.", "The server's log has the traceback.")
        session.end(error)

    async def _place(
        self, session: Session, selector: selectors.Selector, facts: list[compile_pb2.MethodFacts], avoid: frozenset[str]
    ) -> Lease:
        unfit = frozenset[str]().union(*(self._execution.unfit(selector, method, session.project) for method in facts))
        attempt_id = self._new_id()

        def on_wait(why: str) -> None:
            session.tell(SessionEvent(waiting=session_pb2.SessionWaiting(why=why)))

        def on_progress(progress: agent_pb2.RunProgress) -> None:
            for line in progress.log_lines:
                session.tell(SessionEvent(log_line=line))

        waiting = Waiting(
            cell_id=session.id, selector=selector, priority=session.request.priority, order=session.order,
            avoid=avoid, unfit=unfit, project=session.project,
        )  # fmt: skip
        return Lease(attempt_id, await self._placement.device(waiting, attempt_id, on_progress, on_wait))

    async def _hold(self, session: Session, lease: Lease, facts: list[compile_pb2.MethodFacts]) -> EtfarmError:
        """Starts the session on its device and waits for its end; why it ended."""
        session.lease = lease
        result = asyncio.ensure_future(self._result(lease))
        ends: list[asyncio.Future[Any]] = [lease.over, lease.gone, result]
        try:
            try:
                await self._start(session, lease, facts)
            except EtfarmError as error:
                lease.end(error)
            await asyncio.wait([*ends, lease.ready], timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if lease.ready.done():
                session.tell(SessionEvent(ready=lease.ready.result()))
                session.rest()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            elif not any(end.done() for end in ends):
                lease.end(SessionLost(f"{lease.device.name} did not load the program within {START_DEADLINE_S:g} s."))
            if not lease.over.done():
                # A device that stopped serving mostly says why.
                await asyncio.wait([lease.over, result], timeout=LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED)
                lease.end(result.result() if result.done() else lost_error(lease))
        finally:
            result.cancel()
        return lease.over.result()

    async def _start(self, session: Session, lease: Lease, facts: list[compile_pb2.MethodFacts]) -> None:
        request = session.request
        if starting := self._bundles.starting:
            session.tell(SessionEvent(waiting=session_pb2.SessionWaiting(why=starting)))
        runner = await demand_runner(self._bundles, lease.device)
        for method in facts:
            check_device(method, runner, lease.device)
        start = agent_pb2.StartRun(
            attempt_id=lease.attempt_id, device_id=lease.device.id, deadline_s=START_DEADLINE_S,
            candidates=[
                agent_pb2.RunCandidate(
                    cell_id=session.id, program=request.program, bundle=runner.bundle,
                    threads=request.threads if request.HasField("threads") else None,
                )
            ],
            session=agent_pb2.SessionStart(methods=request.methods, cores=request.cores),
        )  # fmt: skip
        if runner.bundle is not None:
            # The agent has them in the bundle itself.
            del start.candidates[0].bundle.operators[:]
        agent = self._registry.session_of(lease.device.id)
        self._runs.mark_sent(lease.attempt_id)
        needed = [request.program.pte, *request.program.data.values(), *([runner.bundle.artifact] if runner.bundle else [])]
        self._runs.permit(lease.attempt_id, [artifact.digest for artifact in needed])
        agent.send(agent_pb2.ServerMessage(start_run=start))

    async def _result(self, lease: Lease) -> EtfarmError:
        """Why the attempt ended, as the agent says."""
        try:
            result = await self._runs.result(lease.attempt_id)
        except AttemptLost as lost:
            return SessionLost(lost.message, "Open another session.", device=lease.device.id)
        return from_proto(result.error) if result.HasField("error") else lost_error(lease)

    def _release(self, session: Session, lease: Lease) -> None:
        """Frees the device, whose agent forgets the attempt or stops it."""
        lease.end(SessionNotFound(f"The session {session.id} has ended.", session=session.id))
        session.wake()
        with suppress(DeviceOffline):
            agent = self._registry.session_of(lease.device.id)
            if self._runs.has_answer(lease.attempt_id):
                agent.send(agent_pb2.ServerMessage(ack=agent_pb2.Ack(attempt_id=lease.attempt_id)))
            else:
                cancel = agent_pb2.CancelRun(attempt_id=lease.attempt_id, reason="the session is over")
                agent.send(agent_pb2.ServerMessage(cancel_run=cancel))
        self._placement.free(lease.attempt_id)
        session.lease = None

    async def _listen(self, session: Session, lease: Lease, reader: AsyncIterator[agent_pb2.SessionReply], holder: str) -> None:
        """Takes an agent's replies until its stream ends."""
        try:
            async for reply in reader:
                kind = reply.WhichOneof("reply")
                if kind == "answered":
                    said = checked(reply.answered.answer)
                    gave = stored(said.outputs, said.measured.samples)
                    # Not whatever digest an agent names: what it has uploaded. The rest would be cleared away with the session.
                    session.remember([each for each in gave if await self._store.is_held(each, [holder])])
                    uploaded = [each for each in gave if await self._store.is_held(each, [holder, session.project])]
                    await self._store.hold(session.project, uploaded, session.owner, for_now=True)
                    answer = lease.answers.get(reply.answered.call_id)
                    if answer is not None and not answer.done():
                        answer.set_result(said)
                elif kind == "log_line":
                    session.tell(SessionEvent(log_line=reply.log_line))
        except Exception as error:  # noqa: BLE001 - whatever broke the stream, the session is over
            log.info("a session's stream broke", session=session.id, error=str(error))
        lease.lose()

    def _of_attempt(self, attempt_id: str) -> tuple[Session, Lease]:
        for session in self._sessions.values():
            if session.lease is not None and session.lease.attempt_id == attempt_id and not session.lease.gone.done():
                return session, session.lease
        raise SessionNotFound(f"Nobody waits for the attempt {attempt_id!r}.", attempt=attempt_id)

    def _look_for_lost(self) -> None:
        """Ends the sessions whose devices are not connected any more."""
        for session in self._sessions.values():
            if session.lease is not None and not session.lease.over.done() and not self._is_served(session.lease):
                session.lease.end(lost_error(session.lease))

    def _is_served(self, lease: Lease) -> bool:
        try:
            self._registry.session_of(lease.device.id)
        except DeviceOffline:
            return False
        return True
