"""Errors of sessions."""

from __future__ import annotations

from etfarm.server.access.ownership import NotYours
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import DeviceError, EtfarmError, Kind, error_for


def agent_cannot_generate_in_sessions(device: Device) -> EtfarmError:
    """Return the error of a generation or a reset in a session on a device whose agent is of a version that knows neither."""
    return error_for(
        "GENERATION_UNSUPPORTED",
        f"The agent of {device.name} can neither generate text in a session nor reset it.",
        "Install the server's version of etfarm on the device.",
        device=device.name,
    )


class ForeignStream(NotYours):
    """A stream from another agent than the one that serves the session's device."""


class SessionLost(DeviceError):
    """A session whose device or agent disappeared."""

    reason = "SESSION_LOST"
    kind = Kind.UNAVAILABLE
