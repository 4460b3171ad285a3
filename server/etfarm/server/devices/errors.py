"""Errors of the registry of devices."""

from __future__ import annotations

from etfarm.wire.errors import DeviceError, Kind, UserError


class DeviceNotFound(UserError):
    """A device id, prefix or name that matches no device, or several."""

    reason = "DEVICE_NOT_FOUND"
    kind = Kind.NOT_FOUND


class AgentConnected(UserError):
    """An agent id that a live agent already uses."""

    reason = "AGENT_CONNECTED"
    kind = Kind.ALREADY_EXISTS


class DeviceServed(AgentConnected):
    """A device that another live agent already serves."""

    reason = "DEVICE_SERVED"

    def __init__(self, device_id: str, agent_id: str) -> None:
        super().__init__(
            f"Device {device_id} is already served by agent {agent_id}.",
            "Give each machine its own id (systemd-machine-id-setup), or start this agent with another --data.",
            device=device_id, agent_id=agent_id,
        )  # fmt: skip


class DeviceNotYours(UserError):
    """A device that belongs to an agent with another principal's token."""

    reason = "DEVICE_NOT_YOURS"
    kind = Kind.PERMISSION_DENIED

    def __init__(self, device_id: str) -> None:
        super().__init__(
            f"Device {device_id} belongs to an agent with another token.",
            f"Ask an admin to run `etfarm devices forget {device_id}`, then start this agent again.", device=device_id,
        )  # fmt: skip


class DeviceConnected(UserError):
    """A device that cannot be forgotten because its agent is connected."""

    reason = "DEVICE_CONNECTED"
    kind = Kind.FAILED_PRECONDITION


class DeviceOffline(DeviceError):
    """A device whose agent is not connected."""

    reason = "DEVICE_OFFLINE"


class BadLabel(UserError):
    """A label that a device cannot have."""

    reason = "BAD_LABEL"


class DeviceTooLarge(UserError):
    """A device description larger than the maximum."""

    reason = "DEVICE_TOO_LARGE"


class TooManyDevices(UserError):
    """More devices than an agent or the farm may have."""

    reason = "TOO_MANY_DEVICES"
    kind = Kind.RESOURCE_EXHAUSTED
