"""Assignment of waiting cells to idle devices, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from etfarm.server.access.scope import DEFAULT_PROJECT
from etfarm.v1.common_pb2 import Error
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.wire.cores import describe_cpus, has_cpus
from etfarm.wire.errors import Kind, UserError
from etfarm.wire.selectors import Selector

IDLE: Final = DeviceState.DEVICE_STATE_IDLE
OFFLINE: Final = DeviceState.DEVICE_STATE_OFFLINE
UNUSABLE: Final = DeviceState.DEVICE_STATE_UNUSABLE
DRAINING: Final = DeviceState.DEVICE_STATE_DRAINING


class NoSuchDevice(UserError):
    """A selector that matches no known device, including offline ones."""

    reason = "NO_SUCH_DEVICE"
    kind = Kind.FAILED_PRECONDITION


@dataclass(frozen=True)
class Waiting:
    """A cell that waits for a device."""

    cell_id: str
    selector: Selector
    priority: int
    """Scheduling priority; a higher one goes first."""
    order: tuple[int, int]
    """The job's number and the cell's index; the smaller one goes first at equal priority."""
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

    def fits(self, device: Device) -> bool:
        """Return whether the cell may run on a device."""
        return self.suits(device) and has_cpus(device, self.threads, self.cores)

    def suits(self, device: Device) -> bool:
        """Return whether the cell may run on a device, apart from the number of the device's cpus."""
        return is_open_to(self.project, device) and self.unfit.isdisjoint(scopes_of(device)) and self.selector.matches(device)

    @property
    def kind(self) -> object:
        """A key that is equal for cells that fit the same devices."""
        return self.selector, self.unfit, self.project, self.threads, self.cores


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


@dataclass(frozen=True)
class Assignment:
    """An idle device that is assigned to a cell."""

    cell_id: str
    device_id: str


class Fitting:
    """The devices that fit each cell, cached by selector, since most cells of a job have the same one."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._by_id: dict[str, list[Device]] = {}
        for device in devices:
            self._by_id.setdefault(device.id.lower(), []).append(device)
        self._known: dict[object, list[Device]] = {}

    def of(self, cell: Waiting) -> list[Device]:
        """Return the devices that fit the cell."""
        if cell.kind not in self._known:
            self._known[cell.kind] = [device for device in self._candidates(cell.selector) if cell.fits(device)]
        return self._known[cell.kind]

    def too_small(self, cell: Waiting) -> list[Device]:
        """Return the devices that would fit the cell with more cpus."""
        return [device for device in self._candidates(cell.selector) if cell.suits(device) and not cell.fits(device)]

    def _candidates(self, selector: Selector) -> Sequence[Device]:
        for term in selector.terms:
            if term.key == "id" and term.operator == "=":
                return self._by_id.get(str(term.value).lower(), [])
        return self._devices


def schedule(waiting: Sequence[Waiting], devices: Sequence[Device]) -> list[Assignment]:
    """Return the assignment of waiting cells to idle devices. Deterministic: uses neither I/O nor a clock.

    Devices that have not failed the cell come first, then real devices before emulated ones, then by id, so that repeated runs
    use the same device. A waiting cell does not block others that could run elsewhere.
    """
    idle = {device.id: device for device in devices if device.state == IDLE}
    assignments: list[Assignment] = []
    fitting_devices = Fitting(list(idle.values()))
    for cell in sorted(waiting, key=lambda cell: (-cell.priority, cell.order)):
        if not idle:
            break
        fitting = [device for device in fitting_devices.of(cell) if device.id in idle]
        if not fitting:
            continue
        chosen = min(fitting, key=lambda device: (device.id in cell.avoid, device.emulated, device.id))
        del idle[chosen.id]
        assignments.append(Assignment(cell.cell_id, chosen.id))
    return assignments


def matching(selector: Selector, text: str, devices: Sequence[Device]) -> list[Device]:
    """Return the known devices that a selector matches, real ones first.

    Raises:
        NoSuchDevice: no device matches; the message lists the known ones.
    """
    selected = [device for device in devices if selector.matches(device)]
    if selected:
        return sorted(selected, key=lambda device: (device.emulated, device.id))
    if not devices:
        raise NoSuchDevice(
            "No device has ever connected to this farm.", "Start `etfarm agent --server ADDRESS` on one.", known=""
        )
    known = "; ".join(describe(device) for device in devices[:10])
    raise NoSuchDevice(f"No known device matches {text!r}.", f"Known devices: {known}.", selector=text, known=known)


def describe(device: Device) -> str:
    """Return a short description of a device."""
    state = DeviceState.Name(device.state).removeprefix("DEVICE_STATE_").lower()
    emulated = ", emulated" if device.emulated else ""
    return f"{device.name} (id={device.id}, arch={device.arch}, soc={device.soc}, cores={device.cores}{emulated}, {state})"


def why_waiting(cell: Waiting, devices: Sequence[Device] | Fitting, runs: Mapping[str, str]) -> str:
    """Return the reason why a cell waits; empty if it only waits for its turn on a device.

    Args:
        devices: the known devices; a `Fitting` if the function is called for several cells.
        runs: ids of live attempts by device id.
    """
    known = devices if isinstance(devices, Fitting) else Fitting(devices)
    fitting, too_small = known.of(cell), known.too_small(cell)
    small = f"too few cpus for {cell.threads} threads: {describe_cpus(too_small, cell.cores)}" if too_small else ""
    if not fitting:
        return small or "no known device matches any more"
    if all(device.state in (OFFLINE, UNUSABLE, DRAINING) for device in fitting):
        offline = sorted(device.name for device in fitting if device.state == OFFLINE)
        reasons = [f"{', '.join(offline)} {'is' if len(offline) == 1 else 'are'} known but offline"] if offline else []
        unusable = sorted((device for device in fitting if device.state == UNUSABLE), key=lambda device: device.name)
        reasons += [f"{device.name} cannot be used: {_sentence(device.problem)}" for device in unusable]
        drained = sorted((device for device in fitting if device.state == DRAINING), key=lambda device: device.name)
        reasons += [f"{device.name} is drained{f': {device.drain.reason}' if device.drain.reason else ''}" for device in drained]
        return "; ".join(filter(None, [*reasons, small]))
    busy = sorted(device.name for device in fitting if device.id in runs and device.state != DRAINING)
    return "; ".join(filter(None, [f"{', '.join(busy)} {'is' if len(busy) == 1 else 'are'} busy", small])) if busy else ""


def _sentence(problem: Error) -> str:
    """Return the problem and its remedy without the final full stop."""
    return f"{problem.message} {problem.remedy}".strip().removesuffix(".")
