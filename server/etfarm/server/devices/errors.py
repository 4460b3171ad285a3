"""Errors of the registry of devices."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.wire.errors import DeviceError, EtfarmError, Kind, UserError, error_for


class DeviceNotFound(UserError):
    """A device id, prefix or name that matches no device, or several."""

    reason = "DEVICE_NOT_FOUND"
    kind = Kind.NOT_FOUND


def agent_offline(agent_id: str) -> EtfarmError:
    """Return the error of an agent id that no connected agent has."""
    shown = agent_id[:80]
    return error_for("AGENT_OFFLINE", f"No agent {shown!r} is connected.", "`etfarm agents list` shows the ids.", agent=shown)


def agent_outdated(version: str) -> EtfarmError:
    """Return the problem of a device whose agent is of before 0.3.0."""
    version = version or "of an unknown version"
    return error_for(
        "AGENT_OUTDATED",
        f"Its agent (etfarm {version}) is of before 0.3.0, and can only be upgraded.",
        "Upgrade it with `etfarm agents upgrade`, or install the server's version of etfarm on its machine.",
        version=version,
    )


def request_id_used(request_id: str, reservation: str) -> EtfarmError:
    """Return the error of a request_id that the owner has sent with something else before."""
    return error_for(
        "REQUEST_ID_USED",
        f"The request_id {request_id[:80]!r} is that of another request, which created reservation {reservation}.",
        "Send another id with each new reservation, such as a UUID, and the same one only with the same request.",
        reservation=reservation,
    )  # fmt: skip


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


def agent_has_devices(agent_id: str, devices: Sequence[str]) -> EtfarmError:
    """Return the error of an agent that cannot be removed because the farm knows devices of it."""
    shown = ", ".join(devices[:20])
    return error_for(
        "AGENT_HAS_DEVICES",
        f"Agent {agent_id} has {len(devices)} device{'s' if len(devices) > 1 else ''}: {shown}.",
        f"Retire {'them' if len(devices) > 1 else 'it'} first: `etfarm devices retire {devices[0]}`.",
        agent_id=agent_id, devices=" ".join(devices[:20]),
    )  # fmt: skip


class DeviceOffline(DeviceError):
    """A device whose agent is not connected."""

    reason = "DEVICE_OFFLINE"


class DeviceTooLarge(UserError):
    """A device description larger than the maximum."""

    reason = "DEVICE_TOO_LARGE"


class TooManyDevices(UserError):
    """More devices than an agent or the farm may have."""

    reason = "TOO_MANY_DEVICES"
    kind = Kind.RESOURCE_EXHAUSTED


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
