"""Errors of several servers of one farm."""

from __future__ import annotations

from etfarm.wire.errors import FarmError, Kind, UserError


class NoLeader(FarmError):
    """A call to a farm of which no server leads at the moment, or whose leading server was lost during the call."""

    reason = "NO_LEADER"
    kind = Kind.UNAVAILABLE


class MessageOverdue(UserError):
    """A message that a standby does not receive within the time limit."""

    reason = "MESSAGE_OVERDUE"
    kind = Kind.UNAVAILABLE

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"A message of the call did not arrive within {limit_s:g} s.", "Try again over a faster connection.", limit_s=limit_s
        )


class BadMetadata(UserError):
    """A call with metadata that gRPC receives and would not send, so that a standby cannot forward it."""

    reason = "BAD_METADATA"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The metadata {name!r} of the call has a value beyond printable ASCII.", "Send binary values as NAME-bin.", name=name
        )


class Fenced(FarmError):
    """A change by a server that no longer leads the farm."""

    reason = "FENCED"
    kind = Kind.UNAVAILABLE


class OtherBlobs(UserError):
    """A server whose blobs are not those of the farm's other servers."""

    reason = "OTHER_BLOBS"


class ServersRunning(FarmError):
    """A farm with a server that runs, for a command that needs all of them stopped."""

    reason = "SERVERS_RUNNING"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, what: str) -> None:
        super().__init__(what, "Stop all servers of the farm, and run it again.")
