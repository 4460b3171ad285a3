"""Errors of several servers of one farm."""

from __future__ import annotations

from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for


class NoLeader(FarmError):
    """A call to a farm of which no server leads at the moment, or whose leading server was lost during the call."""

    reason = "NO_LEADER"
    kind = Kind.UNAVAILABLE


def message_overdue(limit_s: float) -> EtfarmError:
    """Return the error of a message that a standby does not receive within the time limit."""
    return error_for(
        "MESSAGE_OVERDUE",
        f"A message of the call did not arrive within {limit_s:g} s.",
        "Try again over a faster connection.",
        limit_s=limit_s,
    )


def bad_metadata(name: str) -> EtfarmError:
    """Return the error of a call with metadata that gRPC receives and would not send, so that a standby cannot forward it."""
    return error_for(
        "BAD_METADATA",
        f"The metadata {name!r} of the call has a value beyond printable ASCII.",
        "Send binary values as NAME-bin.",
        name=name,
    )


def servers_running(what: str) -> EtfarmError:
    """Return the error of a farm with a server that runs, for a command that needs all of them stopped."""
    return error_for("SERVERS_RUNNING", what, "Stop all servers of the farm, and run it again.")
