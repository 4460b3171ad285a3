"""A cell or session that waits for a device, and the devices that fit it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.v1.device_pb2 import Device, DeviceState, HealthState
from etfarm.wire.cores import MAX_CONCURRENT_RUNS, has_cpus
from etfarm.wire.measurement import RANGES
from etfarm.wire.selectors import Selector

IDLE: Final = DeviceState.DEVICE_STATE_IDLE
BUSY: Final = DeviceState.DEVICE_STATE_BUSY
OFFLINE: Final = DeviceState.DEVICE_STATE_OFFLINE
UNUSABLE: Final = DeviceState.DEVICE_STATE_UNUSABLE
DRAINING: Final = DeviceState.DEVICE_STATE_DRAINING

MIN_PRIORITY, MAX_PRIORITY = RANGES["priority"]

Party = tuple[str, str]
"""A project and the owner in it, between whom devices are shared fairly."""


@dataclass(frozen=True)
class Waiting:
    """A cell that waits for a device, or a session."""

    cell_id: str
    selector: Selector
    priority: int
    """Scheduling priority; a higher one goes first, other things being equal."""
    order: tuple[int, int]
    """The submission in nanoseconds since the epoch, and the cell's index. Its age counts from there, and it breaks ties."""
    avoid: frozenset[str] = frozenset()
    """Ids of devices on which the cell failed before; used only if no other device matches."""
    unfit: frozenset[str] = frozenset()
    """Scopes, as `scopes_of` returns them, whose runner lacks a backend or kernel that the program needs."""
    project: str = DEFAULT_PROJECT
    """Project of the cell, which may not use devices that are restricted to other projects."""
    threads: int = 0
    """Number of threads, for each of which a device must have a cpu; 0 for the device's default."""
    cores: str = ""
    """Measurement.cores, which selects the cpus."""
    owner: str = ""
    """Principal that submitted the cell."""
    exclusive: bool = True
    """Whether the device must run nothing else meanwhile: a measurement or a session."""
    reservation: str = ""
    """Id of the reservation whose devices the cell runs on; empty for devices that are not reserved."""
    program: str = ""
    """Digest of the program; devices that received it before are preferred among equal ones."""
    deadline_s: float | None = None
    """When the cell must have started, in seconds since the epoch."""

    def fits(self, device: Device) -> bool:
        """Return whether the cell may run on a device, whatever the device does now and however healthy it is."""
        return self.selector.matches(device) and self.fits_selected(device)

    def fits_selected(self, device: Device) -> bool:
        """Return whether the cell may run on a device that its selector matches."""
        return self._is_supported_by(device) and self.may_use(device) and has_cpus(device, self.threads, self.cores)

    def suits(self, device: Device) -> bool:
        """Return whether a device is one for the cell, apart from its number of cpus and its reservation."""
        return self._is_supported_by(device) and self.selector.matches(device)

    def _is_supported_by(self, device: Device) -> bool:
        return is_open_to(self.project, device) and (not self.unfit or self.unfit.isdisjoint(scopes_of(device)))

    def may_use(self, device: Device) -> bool:
        """Return whether the reservations permit the cell on a device: each is for the other only."""
        return reservation_of(device) == (self.reservation or None)

    @property
    def kind(self) -> Hashable:
        """A key that is equal for cells that fit the same devices, and occupy them in the same way."""
        return self.selector, self.unfit, self.project, self.threads, self.cores, self.reservation, self.exclusive

    @property
    def party(self) -> Party:
        """The project and the owner whose use of devices counts."""
        return self.project, self.owner


def own_scope(device_id: str) -> str:
    """Return the scope of a device's own runner, which never equals an architecture, whatever the device's id."""
    return f"device {device_id}"


def scopes_of(device: Device) -> tuple[str, str]:
    """Return the scopes of the runners that a device may have: its architecture, and the device itself."""
    return device.arch, own_scope(device.id)


def is_open_to(project: str, device: Device) -> bool:
    """Return whether a device runs a project's jobs and sessions."""
    return not device.projects or project in device.projects


def open_to(project: str, devices: Sequence[Device]) -> list[Device]:
    """Return the devices that run a project's jobs and sessions."""
    return [device for device in devices if is_open_to(project, device)]


def reservation_of(device: Device) -> str | None:
    """Return the id of a device's reservation; None if it is not reserved."""
    return device.reservation.id if device.HasField("reservation") else None


def is_in_service(device: Device) -> bool:
    """Return whether a device takes runs now or after its present ones."""
    return device.state in (IDLE, BUSY) and not is_quarantined(device)


def is_quarantined(device: Device) -> bool:
    """Return whether a device must not be used because of its health."""
    return device.health.state == HealthState.HEALTH_STATE_QUARANTINED


def is_suspect(device: Device) -> bool:
    """Return whether a device is used only if no healthy one matches."""
    return device.health.state == HealthState.HEALTH_STATE_SUSPECT


def slots_of(device: Device) -> int:
    """Return the maximum number of runs at the same time on a device, if none of them is exclusive."""
    return min(max(1, device.concurrent_runs), MAX_CONCURRENT_RUNS)
