"""Errors of the registry of devices."""

from __future__ import annotations

from etfarm.wire.errors import DeviceError, Kind, UserError


class DeviceNotFound(UserError):
    """No device has the id, the prefix of an id or the name, or several have."""

    reason = "DEVICE_NOT_FOUND"
    kind = Kind.NOT_FOUND


class AgentConnected(UserError):
    """A live agent has the same id."""

    reason = "AGENT_CONNECTED"
    kind = Kind.ALREADY_EXISTS


class DeviceServed(AgentConnected):
    """A live agent serves the same device."""

    reason = "DEVICE_SERVED"

    def __init__(self, device_id: str, agent_id: str) -> None:
        super().__init__(
            f"Device {device_id} is served by the agent {agent_id} already.",
            "Give the machines ids of their own (systemd-machine-id-setup), or this agent another --data.",
            device=device_id, agent_id=agent_id,
        )  # fmt: skip


class DeviceNotYours(UserError):
    """A device belongs to an agent with another principal's token."""

    reason = "DEVICE_NOT_YOURS"
    kind = Kind.PERMISSION_DENIED

    def __init__(self, device_id: str) -> None:
        super().__init__(
            f"Device {device_id} belongs to an agent with another token.",
            f"Ask an admin to run `etfarm devices forget {device_id}`, then start this agent again.", device=device_id,
        )  # fmt: skip


class DeviceConnected(UserError):
    """A device cannot be forgotten while its agent is connected."""

    reason = "DEVICE_CONNECTED"
    kind = Kind.FAILED_PRECONDITION


class DeviceOffline(DeviceError):
    """The device's agent is not connected."""

    reason = "DEVICE_OFFLINE"


class DeviceTooLarge(UserError):
    """The description of a device is larger than the farm keeps."""

    reason = "DEVICE_TOO_LARGE"


class TooManyDevices(UserError):
    """An agent announces more devices than it, or the farm, may have."""

    reason = "TOO_MANY_DEVICES"
    kind = Kind.RESOURCE_EXHAUSTED
