"""Errors of several servers of one farm."""

from __future__ import annotations

from etfarm.wire.errors import EtfarmError, FarmError, Kind, error_for


class NoLeader(FarmError):
    """A call to a farm of which no server leads at the moment, or whose leading server was lost during the call."""

    reason = "NO_LEADER"
    kind = Kind.UNAVAILABLE


def servers_running(what: str) -> EtfarmError:
    """Return the error of a farm with a server that runs, for a command that needs all of them stopped."""
    return error_for("SERVERS_RUNNING", what, "Stop all servers of the farm, and run it again.")
