"""State of one session: its lease on a device, its calls, and the events for its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from etfarm.server.devices.scheduling.waiting import MAX_PRIORITY, MIN_PRIORITY
from etfarm.server.sessions.errors import (
    SessionLost,
)
from etfarm.v1 import agent_pb2, session_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.v1.session_pb2 import SessionAnswer, SessionEvent
from etfarm.wire import digest, sessions
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.status import to_proto
from etfarm.wire.token_buffer import TokenBuffer

_MAX_IDLE_S: Final = 86_400.0

IDLE_TIMEOUT_S: Final = 600.0
"""Default time without calls after which a session ends, in seconds."""


MAX_CALLS: Final = 64
"""Maximum number of open calls of one session: each may hold up to 1 MiB of inline tensors in the server's memory."""


MAX_WAITING_BYTES: Final = 32 << 20
"""Maximum size of the inline tensors of a session's open calls."""

MAX_EVENTS: Final = 1_000
MAX_EVENT_BYTES: Final = 4 << 20
"""Maximum number and size of unread events. Log lines and reasons to wait beyond them are dropped; state changes are not."""

MAX_TENSORS: Final = 100_000
"""Maximum number of digests that a session records for deletion at its end."""


class Lease:
    """Lease of a device by a session, from the session's placement until the device is free again."""

    def __init__(self, attempt_id: str, device: Device) -> None:
        self.attempt_id = attempt_id
        self.device = device
        self.ready: asyncio.Future[session_pb2.SessionReady] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the device no longer serves the session; the reason is not known yet."""
        self.over: asyncio.Future[EtfarmError] = asyncio.get_running_loop().create_future()
        """The reason why the session ended on this device."""
        self.outgoing: asyncio.Queue[agent_pb2.SessionCall | None] = asyncio.Queue()
        self.answers: dict[str, asyncio.Future[SessionAnswer]] = {}
        self.texts: dict[str, TokenBuffer] = {}
        """The tokens of generations that were not answered yet, by call id."""
        self.served = False

    def lose(self) -> None:
        """Record that the device's stream ended."""
        if not self.gone.done():
            self.gone.set_result(None)
            self.outgoing.put_nowait(None)

    def end(self, error: EtfarmError) -> None:
        """End the lease and its open calls. Only the first reason counts."""
        if self.over.done():
            return
        self.over.set_result(error)
        self.lose()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_result(SessionAnswer(error=to_proto(error)))


class Session:
    """A session of one owner."""

    def __init__(
        self, session_id: str, owner: str, project: str, request: session_pb2.OpenSessionRequest, *, order: tuple[int, int]
    ) -> None:
        self.id = session_id
        self.owner = owner
        self.project = project
        self.request = request
        self.order = order
        self.events: asyncio.Queue[SessionEvent | None] = asyncio.Queue()
        self._event_bytes = 0
        self.turn = asyncio.Lock()
        self.lease: Lease | None = None
        self.calls: dict[str, int] = {}
        """Sizes of the inline tensors of open calls in bytes, by call id."""
        self.tensors: set[str] = set()
        """Digests of the tensors that calls transferred through the store."""
        self.exchanges: set[asyncio.Task[SessionAnswer]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self.over: EtfarmError | None = None
        """The reason why the session ended; None while it is live."""

    def admit(self, call_id: str, size_bytes: int = 0) -> Lease:
        """Return the lease that a new call uses.

        Args:
            size_bytes: size of the call's inline tensors.

        Raises:
            SESSION_NOT_READY: the program is not loaded yet.
            CALL_KNOWN: a call with this id is open.
            TooManyCalls: the session has too many open calls.
        """
        if self.lease is None or not self.lease.ready.done():
            raise error_for(
                "SESSION_NOT_READY", f"The session {self.id} is not ready.", "Wait for the event READY.", session=self.id
            )
        if not call_id or call_id in self.calls:
            raise error_for("CALL_KNOWN", f"A call with the id {call_id!r} is already in progress.", "Give each call its own id.")
        if len(self.calls) >= MAX_CALLS:
            raise error_for(
                "TOO_MANY_CALLS",
                f"The session {self.id} has {MAX_CALLS} calls in progress, which is the limit.",
                "Wait for an answer before the next one.",
                session=self.id,
                limit=MAX_CALLS,
            )
        if self.calls and sum(self.calls.values()) + size_bytes > MAX_WAITING_BYTES:
            raise error_for(
                "TOO_MANY_CALLS",
                f"The session {self.id} has {MAX_WAITING_BYTES >> 20} MiB of tensors in calls in progress, which is the limit.",
                "Wait for an answer before the next one.",
                session=self.id,
                limit=MAX_WAITING_BYTES,
            )
        return self.lease

    def publish(self, event: SessionEvent) -> None:
        """Queue an event for the owner. If the owner does not read, events that can be missed are dropped."""
        event.session_id = self.id
        size = event.ByteSize()
        is_full = self.events.qsize() >= MAX_EVENTS or self._event_bytes + size > MAX_EVENT_BYTES
        if is_full and event.WhichOneof("event") in ("log_line", "waiting"):
            return
        self._event_bytes += size
        self.events.put_nowait(event)

    async def next_event(self) -> SessionEvent | None:
        """Wait for the owner's next event; return None after the last one."""
        event = await self.events.get()
        self._event_bytes -= event.ByteSize() if event is not None else 0
        return event

    def remember(self, digests: Iterable[str]) -> None:
        """Record the digests of tensors that the session's calls brought into the store."""
        for each in digests:
            if len(self.tensors) < MAX_TENSORS:
                self.tensors.add(each)

    def end(self, error: EtfarmError) -> None:
        """End the session with a last event that states the reason."""
        self.over = error
        self.publish(SessionEvent(ended=to_proto(error)))
        self.events.put_nowait(None)

    def rest(self) -> None:
        """Start the idle timeout if the program is on a device."""
        self.wake()
        if self.lease is None or self.lease.over.done():
            return
        idle_s = self.request.idle_timeout_s if self.request.HasField("idle_timeout_s") else IDLE_TIMEOUT_S
        message = f"The session received no call for {idle_s:g} s."
        error = error_for("SESSION_IDLE", message, "Open another, with a longer idle_timeout_s.", idle_s=idle_s)
        self._idle = asyncio.get_running_loop().call_later(idle_s, self.lease.end, error)

    def wake(self) -> None:
        """Stop the idle timeout: a call is open, or the session has ended."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None


def lost_error(lease: Lease) -> SessionLost:
    """Return the error for a session whose device states no reason for its end."""
    return SessionLost(f"{lease.device.name} no longer serves the session.", "Open another session.", device=lease.device.id)


def validate_request(request: session_pb2.OpenSessionRequest) -> None:
    """Validate a request, independently of the farm's devices.

    Raises:
        BAD_SESSION: the request contradicts itself.
    """
    if not request.HasField("program"):
        raise error_for("BAD_SESSION", "The session has no program.", "Name one.")
    if request.HasField("threads") and not 1 <= request.threads <= 1024:
        raise error_for("BAD_SESSION", f"`threads` must be 1 to 1024, got {request.threads}.")
    if request.HasField("idle_timeout_s") and not 0 < request.idle_timeout_s <= _MAX_IDLE_S:
        raise error_for(
            "BAD_SESSION",
            f"`idle_timeout_s` must be above 0 and at most {_MAX_IDLE_S:g} (a day), got {request.idle_timeout_s:g}.",
        )
    if not MIN_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise error_for("BAD_SESSION", f"`priority` must be {MIN_PRIORITY} to {MAX_PRIORITY}, got {request.priority}.")
    program = request.program
    if program.digest != digest.of_program(program.pte.digest, {name: data.digest for name, data in program.data.items()}):
        raise error_for("BAD_SESSION", "The program's digest does not match its files.", "Make it with digest.of_program.")


def stored_digests(*tensors: session_pb2.SessionTensors) -> list[str]:
    """Return the digests of the tensors that are transferred through the store."""
    return [tensor.artifact.digest for tensor in tensors if tensor.HasField("artifact")]


def limit_answer(answer: SessionAnswer) -> SessionAnswer:
    """Return the answer for the owner, replaced by an error if it has more than may be inline, or a negative number."""
    size = max(len(answer.outputs.inline), len(answer.measured.samples.inline))
    if size > sessions.INLINE_BYTES:
        return bad_answer(f"{size} bytes inline; at most 1 MiB is allowed")
    for message in (answer, answer.measured, answer.generated):
        for field, value in message.ListFields():
            if isinstance(value, (int, float)) and value < 0:
                return bad_answer(f"`{field.name}` of {value:g}, which cannot be negative")
    return answer


def bad_answer(what: str) -> SessionAnswer:
    """Return the error for an answer with something that no device sends."""
    return SessionAnswer(error=to_proto(error_for("BAD_ANSWER", f"The device answered with {what}.", "Update its etfarm.")))
