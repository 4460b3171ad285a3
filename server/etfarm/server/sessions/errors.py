"""Errors of sessions."""

from __future__ import annotations

from etfarm.wire.errors import DeviceError, FarmError, Kind, UserError


class BadSession(UserError):
    """A request for a session contradicts itself."""

    reason = "BAD_SESSION"


class SessionNotReady(UserError):
    """A call came before the program was loaded."""

    reason = "SESSION_NOT_READY"
    kind = Kind.FAILED_PRECONDITION


class SessionServed(UserError):
    """Two streams serve one session."""

    reason = "SESSION_SERVED"
    kind = Kind.ALREADY_EXISTS


class CallKnown(UserError):
    """Two calls have one id."""

    reason = "CALL_KNOWN"
    kind = Kind.ALREADY_EXISTS


class TooManyCalls(UserError):
    """More calls of a session wait than it keeps."""

    reason = "TOO_MANY_CALLS"
    kind = Kind.RESOURCE_EXHAUSTED


class NoReady(UserError):
    """A session's stream begins with another message."""

    reason = "NO_READY"


class ForeignStream(UserError):
    """A session is served by another agent than the one of its device."""

    reason = "NOT_YOURS"
    kind = Kind.PERMISSION_DENIED


class SessionIdle(UserError):
    """Nobody called for too long."""

    reason = "SESSION_IDLE"
    kind = Kind.DEADLINE_EXCEEDED


class SessionLost(DeviceError):
    """The device or its agent went away."""

    reason = "SESSION_LOST"
    kind = Kind.UNAVAILABLE


class BadAnswer(DeviceError):
    """A device answers with what no message may carry."""

    reason = "BAD_ANSWER"
    kind = Kind.INVALID_ARGUMENT


class ServerStopped(FarmError):
    """The server ends, and its sessions with it."""

    reason = "SERVER_STOPPED"
    kind = Kind.UNAVAILABLE
