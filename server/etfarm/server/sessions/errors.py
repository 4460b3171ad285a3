"""Errors of sessions."""

from __future__ import annotations

from etfarm.server.access.ownership import NotYours
from etfarm.wire.errors import DeviceError, Kind


class ForeignStream(NotYours):
    """A stream from another agent than the one that serves the session's device."""


class SessionLost(DeviceError):
    """A session whose device or agent disappeared."""

    reason = "SESSION_LOST"
    kind = Kind.UNAVAILABLE
