"""Leases of sessions: a session is placed on a device, is started there, and occupies the device until it ends."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

from etfarm.server.devices.runs import AttemptLost
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.server.jobs.cells.attempts import OnDeviceFault
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.cells.placement import Subject
from etfarm.server.jobs.cells.requirements import Requirements, require_support
from etfarm.server.sessions.errors import SessionLost
from etfarm.server.sessions.session import Lease, Session, lost_error
from etfarm.v1 import agent_pb2, compile_pb2, session_pb2
from etfarm.v1.job_pb2 import QueuedRun
from etfarm.v1.session_pb2 import SessionEvent
from etfarm.wire import selectors
from etfarm.wire.errors import EtfarmError, FarmError, Fault, error_for
from etfarm.wire.status import from_proto

log = structlog.get_logger()

START_DEADLINE_S: Final = 600.0
"""Time limit for fetching and loading a program on the device, in seconds."""

LAST_WORD_S: Final = 1.0
"""Time in which a device that stopped serving may report the reason, in seconds."""

_MAX_PLACEMENTS: Final = 3


class Leasing:
    """The sequence of steps that leads a session through its leases on devices."""

    def __init__(self, attempts: DeviceAttempts, requirements: Requirements, on_device_fault: OnDeviceFault) -> None:
        self._on_device_fault = on_device_fault
        self._attempts = attempts
        self._requirements = requirements

    async def lead(self, session: Session, selector: selectors.Selector, facts: list[compile_pb2.MethodFacts]) -> None:
        """Lead a session from the queue to its end. The last event states why it ended, unless the owner left."""
        failed: list[str] = []
        error: EtfarmError
        try:
            while True:
                lease = await self._place(session, selector, facts, frozenset(failed))
                try:
                    error = await self._hold(session, lease, facts)
                    if error.fault is Fault.DEVICE:
                        await self._on_device_fault(lease.device.id, error, attempt_id=lease.attempt_id, project=session.project)
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
            log.exception("a session failed because of a bug", session=session.id)
            error = FarmError(f"etfarm has a bug: {bug!r}.", "The server's log has the traceback.")
        session.end(error)

    async def _place(
        self, session: Session, selector: selectors.Selector, facts: list[compile_pb2.MethodFacts], avoid: frozenset[str]
    ) -> Lease:
        unfit = frozenset[str]().union(*(self._requirements.find_unfit(selector, method, session.project) for method in facts))

        def on_wait(why: str) -> None:
            session.publish(SessionEvent(waiting=session_pb2.SessionWaiting(why=why)))

        def on_progress(progress: agent_pb2.RunProgress) -> None:
            for line in progress.log_lines:
                session.publish(SessionEvent(log_line=line))

        waiting = Waiting(
            cell_id=session.id,
            selector=selector,
            priority=session.request.priority,
            order=session.order,
            avoid=avoid,
            unfit=unfit,
            project=session.project,
            threads=session.request.threads,
            cores=session.request.cores,
            reservation=session.request.reservation_id,
            owner=session.owner,
            program=session.request.program.pte.digest,
        )
        entry = QueuedRun(session_id=session.id, selector=session.request.selector, method=", ".join(session.request.methods))
        device, attempt_id = await self._attempts.place(waiting, on_progress, on_wait, Subject(entry))
        return Lease(attempt_id, device)

    async def _hold(self, session: Session, lease: Lease, facts: list[compile_pb2.MethodFacts]) -> EtfarmError:
        """Start the session on its device and wait for its end; return the reason of the end."""
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
                session.publish(SessionEvent(ready=lease.ready.result()))
                session.rest()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            elif not any(end.done() for end in ends):
                lease.end(SessionLost(f"{lease.device.name} did not load the program within {START_DEADLINE_S:g} s."))
            if not lease.over.done():
                # A device that stopped serving usually reports the reason.
                await asyncio.wait([lease.over, result], timeout=LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED)
                lease.end(result.result() if result.done() else lost_error(lease))
        finally:
            result.cancel()
        why = lease.over.result()
        if isinstance(why, SessionLost) and result.done() and not result.cancelled():
            # Why the attempt was lost tells whether that counts against the device: its agent may have been stopped on purpose.
            why.metadata.update({key: value for key, value in result.result().metadata.items() if key == "cause"})
        return why

    async def _start(self, session: Session, lease: Lease, facts: list[compile_pb2.MethodFacts]) -> None:
        request = session.request
        if starting := self._attempts.starting:
            session.publish(SessionEvent(waiting=session_pb2.SessionWaiting(why=starting)))
        runner = await self._attempts.runner_of(lease.device)
        for method in facts:
            require_support(method, runner, lease.device)
        start = agent_pb2.StartRun(
            attempt_id=lease.attempt_id,
            device_id=lease.device.id,
            deadline_s=START_DEADLINE_S,
            candidates=[
                agent_pb2.RunCandidate(
                    cell_id=session.id,
                    program=request.program,
                    bundle=runner.bundle,
                    threads=request.threads if request.HasField("threads") else None,
                )
            ],
            session=agent_pb2.SessionStart(methods=request.methods, cores=request.cores),
        )
        self._attempts.send(start, [request.program.pte, *request.program.data.values()])

    async def _result(self, lease: Lease) -> EtfarmError:
        """Wait for the end of the attempt; return the reason that the agent reports."""
        try:
            result = await self._attempts.result(lease.attempt_id)
        except AttemptLost as lost:
            cause = lost.metadata.get("cause", "")
            return SessionLost(lost.message, "Open another session.", device=lease.device.id, cause=cause)
        return from_proto(result.error) if result.HasField("error") else lost_error(lease)

    def _release(self, session: Session, lease: Lease) -> None:
        """Free the device. Its agent gets an acknowledgement of the result, or has to stop the attempt."""
        lease.end(error_for("SESSION_NOT_FOUND", f"The session {session.id} has ended.", session=session.id))
        session.wake()
        if self._attempts.has_answer(lease.attempt_id):
            self._attempts.acknowledge(lease.attempt_id, lease.device.id)
        else:
            self._attempts.cancel(lease.attempt_id, lease.device.id, "the session is over")
        session.lease = None
