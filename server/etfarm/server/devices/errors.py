"""Errors of the registry of devices."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.wire.errors import DeviceError, Kind, UserError


class DeviceNotFound(UserError):
    """A device id, prefix or name that matches no device, or several."""

    reason = "DEVICE_NOT_FOUND"
    kind = Kind.NOT_FOUND


class AgentOffline(UserError):
    """An agent id that no connected agent has."""

    reason = "AGENT_OFFLINE"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, agent_id: str) -> None:
        shown = agent_id[:80]
        super().__init__(f"No agent {shown!r} is connected.", "`etfarm agents list` shows the ids.", agent=shown)


class AgentConnected(UserError):
    """An agent id that a live agent already uses."""

    reason = "AGENT_CONNECTED"
    kind = Kind.ALREADY_EXISTS


class DeviceServed(AgentConnected):
    """A device that another live agent already serves."""

    reason = "DEVICE_SERVED"

    def __init__(self, device_id: str, agent_id: str, host: str) -> None:
        where = f" on {host}" if host else ""
        super().__init__(
            f"Device {device_id} is served by agent {agent_id}{where}, which is connected: this is a second agent on its machine "
            "or on a copy of its disk.",
            "If it is a phone or has moved here, stop the other agent. To serve both machines, delete `device_id` in this "
            "agent's data folder and start it again, or give it another --data: it then has a device of its own.",
            device=device_id, agent_id=agent_id,
        )  # fmt: skip


class DeviceNotYours(UserError):
    """A device that belongs to an agent with another principal's token, which is not connected."""

    reason = "DEVICE_NOT_YOURS"
    kind = Kind.PERMISSION_DENIED

    def __init__(self, device_id: str, agent_id: str, principal: str) -> None:
        super().__init__(
            f"Device {device_id} belongs to agent {agent_id} of another token, which is not connected.",
            f"If the device is this one, ask an admin to run `etfarm agents bind {agent_id} {principal}`. If this is a copy of "
            "its disk, start this agent with another --data: it then has a device of its own.",
            device=device_id, agent_id=agent_id,
        )  # fmt: skip


class DeviceConnected(UserError):
    """A device that cannot be forgotten because its agent is connected."""

    reason = "DEVICE_CONNECTED"
    kind = Kind.FAILED_PRECONDITION


class BadRetirement(UserError):
    """A retirement with a time that is out of range."""

    reason = "BAD_RETIREMENT"


class DevicesBusy(UserError):
    """Devices whose runs did not end in time."""

    reason = "DEVICES_BUSY"
    kind = Kind.DEADLINE_EXCEEDED


class AgentHasDevices(UserError):
    """An agent that cannot be removed because the farm knows devices of it."""

    reason = "AGENT_HAS_DEVICES"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, agent_id: str, devices: Sequence[str]) -> None:
        shown = ", ".join(devices[:20])
        super().__init__(
            f"Agent {agent_id} has {len(devices)} device{'s' if len(devices) > 1 else ''}: {shown}.",
            f"Retire {'them' if len(devices) > 1 else 'it'} first: `etfarm devices retire {devices[0]}`.",
            agent_id=agent_id, devices=" ".join(devices[:20]),
        )  # fmt: skip


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


class BadReservation(UserError):
    """A reservation for a duration or a number of devices that is out of range."""

    reason = "BAD_RESERVATION"


class DevicesUnavailable(UserError):
    """Fewer devices that can be reserved now than requested."""

    reason = "DEVICES_UNAVAILABLE"
    kind = Kind.FAILED_PRECONDITION


class ReservationNotFound(UserError):
    """A reservation that does not exist, or that belongs to another project."""

    reason = "RESERVATION_NOT_FOUND"
    kind = Kind.NOT_FOUND

    def __init__(self, reservation_id: str) -> None:
        super().__init__(
            f"There is no reservation {reservation_id[:80]!r}.", "`etfarm devices reservations` lists those of your projects.",
            reservation=reservation_id[:80],
        )  # fmt: skip


class ReservationEnded(UserError):
    """A reservation that has expired or was released."""

    reason = "RESERVATION_ENDED"
    kind = Kind.FAILED_PRECONDITION

    def __init__(self, reservation_id: str, how: str) -> None:
        super().__init__(
            f"The reservation {reservation_id} {how}.", "Reserve again: `etfarm devices reserve`.", reservation=reservation_id
        )


class DeviceNotReserved(UserError):
    """A selector that matches no device of the reservation that a job or session names."""

    reason = "DEVICE_NOT_RESERVED"
    kind = Kind.FAILED_PRECONDITION


class BadTimeRange(UserError):
    """A time range that ends before it starts."""

    reason = "BAD_TIME_RANGE"
