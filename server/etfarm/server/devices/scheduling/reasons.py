"""Why a cell waits, in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Final

from etfarm.server.devices.scheduling.waiting import (
    BUSY,
    DRAINING,
    IDLE,
    OFFLINE,
    UNUSABLE,
    Waiting,
    is_in_service,
    is_quarantined,
    is_suspect,
)
from etfarm.v1.common_pb2 import Error
from etfarm.v1.device_pb2 import Device
from etfarm.wire.cores import describe_cpus, has_cpus

_NAMED: Final = 5
"""Maximum number of devices that a reason names."""

_EXPLAINED: Final = 3
"""Maximum number of devices that a reason explains one by one."""


def why_waiting(cell: Waiting, devices: Sequence[Device], busy: Collection[str]) -> str:
    """Return the reason why a cell waits; empty if it only waits for its turn on a device.

    Args:
        cell: the cell.
        devices: the known devices, or at least those that the cell's selector matches.
        busy: ids of the devices that run something.
    """
    suited = sorted((device for device in devices if cell.suits(device)), key=lambda device: (device.name, device.id))
    usable = [device for device in suited if cell.may_use(device)]
    too_small = [device for device in usable if not has_cpus(device, cell.threads, cell.cores)]
    small = f"too few cpus for {cell.threads} threads: {describe_cpus(too_small, cell.cores)}" if too_small else ""
    fitting = [device for device in usable if has_cpus(device, cell.threads, cell.cores)]
    in_service = [device for device in fitting if is_in_service(device)]
    if in_service:
        return "; ".join(filter(None, [*_busy(cell, in_service, busy), small]))
    offline = [device.name for device in fitting if device.state == OFFLINE and not is_quarantined(device)]
    reasons = [f"{_named(offline)} known but offline"] if offline else []
    reasons += _each(
        [f"{device.name} cannot be used: {_sentence(device.problem)}" for device in fitting if device.state == UNUSABLE]
    )
    reasons += _each(
        [f"{device.name} is drained{_because(device.drain.reason)}" for device in fitting if device.state == DRAINING]
    )
    reasons += _each(
        [
            f"{device.name} is quarantined{_because(device.health.reason)}"
            for device in fitting
            if is_quarantined(device) and device.state in (IDLE, BUSY, OFFLINE)
        ]
    )
    reasons += _each([_reserved(device) for device in suited if not cell.reservation and not cell.may_use(device)])
    reasons += [small] if small else []
    if not reasons and cell.reservation:
        return f"no device of the reservation {cell.reservation} matches"
    return "; ".join(reasons) or "no known device matches any more"


def must_start_by(cell: Waiting, longest_s: float | None) -> str:
    """Return until when a cell waits; empty if it has no limit.

    Args:
        cell: the cell.
        longest_s: when the time is over that its job lets it wait, in seconds since the epoch; None without such a limit.
    """
    if cell.deadline_s is not None and (longest_s is None or cell.deadline_s <= longest_s):
        return f"it must start by {_time(cell.deadline_s)}, its deadline"
    return f"it waits until {_time(longest_s)} at most" if longest_s is not None else ""


def _busy(cell: Waiting, in_service: Sequence[Device], busy: Collection[str]) -> list[str]:
    """Return what devices do that a cell could use now or later; nothing if one of them is about to take it."""
    working = [device.name for device in in_service if device.id in busy]
    if not working:
        return []
    reasons = [f"{_named(working)} busy"]
    spared = [device for device in in_service if device.id not in busy and is_suspect(device)]
    if spared and any(not is_suspect(device) and device.id not in cell.avoid for device in in_service):
        reasons += _each(
            [f"{device.name} is used only if no healthy device matches{_because(device.health.reason)}" for device in spared]
        )
    return reasons


def _named(names: Sequence[str]) -> str:
    """Return the names with their verb: `a, b are`. Of many devices only the number, which changes less often."""
    if len(names) > _NAMED:
        return f"{len(names)} devices that match are"
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _each(reasons: Sequence[str]) -> list[str]:
    """Return the first reasons, and how many more devices have one."""
    more = len(reasons) - _EXPLAINED
    return [*reasons[:_EXPLAINED], *([f"and so on for {more} more"] if more > 0 else [])]


def _reserved(device: Device) -> str:
    until = device.reservation.expire_time
    return f"{device.name} is reserved{f' until {_time(until.ToNanoseconds() / 1e9)}' if until.seconds else ''}"


def _because(reason: str) -> str:
    return f": {reason.strip().removesuffix('.')}" if reason.strip() else ""


def _time(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _sentence(problem: Error) -> str:
    """Return the problem and its remedy without the final full stop."""
    return f"{problem.message} {problem.remedy}".strip().removesuffix(".")
