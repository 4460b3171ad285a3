"""Errors of sessions."""

from __future__ import annotations

from etfarm.server.access.ownership import NotYours
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import DeviceError, FarmError, Kind, UserError


class BadSession(UserError):
    """A session request that contradicts itself."""

    reason = "BAD_SESSION"


class SessionNotReady(UserError):
    """A call that arrived before the program was loaded."""

    reason = "SESSION_NOT_READY"
    kind = Kind.FAILED_PRECONDITION


class SessionServed(UserError):
    """A second stream that serves the same session."""

    reason = "SESSION_SERVED"
    kind = Kind.ALREADY_EXISTS


class CallKnown(UserError):
    """A call id that another open call already uses."""

    reason = "CALL_KNOWN"
    kind = Kind.ALREADY_EXISTS


class TooManyCalls(UserError):
    """More open calls than a session may have."""

    reason = "TOO_MANY_CALLS"
    kind = Kind.RESOURCE_EXHAUSTED


class AgentCannotGenerateInSessions(UserError):
    """A generation or a reset in a session on a device whose agent is of a version that knows neither."""

    reason = "GENERATION_UNSUPPORTED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, device: Device) -> None:
        super().__init__(
            f"The agent of {device.name} can neither generate text in a session nor reset it.",
            "Install the server's version of etfarm on the device.",
            device=device.name,
        )


class NoReady(UserError):
    """A session stream whose first message is not `ready`."""

    reason = "NO_READY"


class ForeignStream(NotYours):
    """A stream from another agent than the one that serves the session's device."""


class SessionIdle(UserError):
    """A session without calls for too long."""

    reason = "SESSION_IDLE"
    kind = Kind.DEADLINE_EXCEEDED


class SessionLost(DeviceError):
    """A session whose device or agent disappeared."""

    reason = "SESSION_LOST"
    kind = Kind.UNAVAILABLE


class BadAnswer(DeviceError):
    """An answer from a device that exceeds the limits of a message, or that contradicts what it has uploaded."""

    reason = "BAD_ANSWER"
    kind = Kind.INVALID_ARGUMENT


class ServerStopped(FarmError):
    """A session that ends because the server stops."""

    reason = "SERVER_STOPPED"
    kind = Kind.UNAVAILABLE
