"""The choice of devices to reserve, and what others see of a reservation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Final

from etfarm.server.access.scope import Scope
from etfarm.v1.device_pb2 import Device, DeviceState, HealthState, Reservation
from etfarm.wire.errors import error_for

_NAMED: Final = 5
"""Maximum number of devices that an error names."""

_USABLE: Final = (DeviceState.DEVICE_STATE_IDLE, DeviceState.DEVICE_STATE_BUSY)


def choose(matching: Sequence[Device], count: int, selector: str) -> list[Device]:
    """Return the devices to reserve. Pure: equal arguments give equal answers.

    Healthy devices come first, then real ones before emulated ones, idle ones before busy ones, then by id.

    Raises:
        DEVICES_UNAVAILABLE: fewer than `count` can be reserved; the message says why.
    """
    obstacles = {device.id: why for device in matching if (why := _why_not(device))}
    free = [device for device in matching if device.id not in obstacles]
    if len(free) < count:
        others = list_briefly([f"{device.name} {obstacles[device.id]}" for device in matching if device.id in obstacles], "; ")
        what = f"{len(matching)} {'device matches' if len(matching) == 1 else 'devices match'} {selector!r}"
        raise error_for(
            "DEVICES_UNAVAILABLE",
            f"{what}, {len(free)} can be reserved now, and {count} {'is' if count == 1 else 'are'} wanted"
            f"{f': {others}' if others else ''}.",
            "Wait, ask for fewer, or choose another selector.", free=len(free), count=count,
        )  # fmt: skip
    suspect = HealthState.HEALTH_STATE_SUSPECT
    busy = DeviceState.DEVICE_STATE_BUSY
    free.sort(key=lambda device: (device.health.state == suspect, device.emulated, device.state == busy, device.id))
    return free[:count]


def brief(reservation: Reservation, device_id: str, scope: Scope) -> Reservation:
    """Return a reservation, given without its devices, as Device.reservation shows it to a caller."""
    shown = Reservation()
    shown.CopyFrom(reservation)
    shown.device_id = device_id
    if not scope.allows(reservation.project):
        for name in ("id", "project", "owner", "selector", "reason"):
            shown.ClearField(name)
    return shown


def _why_not(device: Device) -> str:
    """Return why a device cannot be reserved now; empty if it can."""
    if device.HasField("reservation"):
        until = device.reservation.expire_time.ToDatetime(UTC)
        return f"is reserved by {device.reservation.owner or 'another project'} until {until:%Y-%m-%d %H:%M} UTC"
    if device.health.state == HealthState.HEALTH_STATE_QUARANTINED:
        return "is quarantined"
    if device.state in _USABLE:
        return ""
    if device.HasField("drain"):
        return f"is drained{f': {device.drain.reason}' if device.drain.reason else ''}"
    return "is offline" if device.state == DeviceState.DEVICE_STATE_OFFLINE else "cannot be used"


def list_briefly(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = f"{separator}and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return separator.join(names[:_NAMED]) + more
