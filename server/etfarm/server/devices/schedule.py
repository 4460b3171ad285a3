"""Assignment of waiting cells to devices, as a pure function, and the devices that a selector matches."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from etfarm.server.devices.scheduling.board import Assignment as Assignment
from etfarm.server.devices.scheduling.board import Board
from etfarm.server.devices.scheduling.reasons import why_waiting as why_waiting
from etfarm.server.devices.scheduling.usage import NO_USAGE, Usage
from etfarm.server.devices.scheduling.waiting import Waiting as Waiting
from etfarm.server.devices.scheduling.waiting import is_open_to as is_open_to
from etfarm.server.devices.scheduling.waiting import open_to as open_to
from etfarm.server.devices.scheduling.waiting import own_scope as own_scope
from etfarm.server.devices.scheduling.waiting import scopes_of as scopes_of
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.wire.errors import Kind, UserError
from etfarm.wire.selectors import Selector, hint_label


class NoSuchDevice(UserError):
    """A selector that matches no known device, including offline ones."""

    reason = "NO_SUCH_DEVICE"
    kind = Kind.FAILED_PRECONDITION


def schedule(
    waiting: Sequence[Waiting], devices: Sequence[Device], usage: Usage = NO_USAGE, now: datetime | None = None
) -> list[Assignment]:
    """Return the assignment of waiting cells to devices. Deterministic: uses neither I/O nor a clock.

    Cells go in the order of `ranking`: by priority, age, deadline and fair share. Devices that have not failed the cell come
    first, then healthy ones, then real ones before emulated ones, then those that have the program, then by id, so that repeated
    runs use the same device. A waiting cell does not block others that could run elsewhere.

    Args:
        waiting: the cells, in any order.
        devices: the known devices, in any order.
        usage: what runs on the devices, what they were sent, and the decayed device time of each party.
        now: cells whose deadline is over then are left out; None to consider all.
    """
    board = Board()
    for device in devices:
        board.put(device, usage.running.get(device.id, ()), usage.sent.get(device.id, ()))
    for cell in waiting:
        if now is None or cell.deadline_s is None or now.timestamp() < cell.deadline_s:
            board.add(cell)
    return board.assign(usage.lately)


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
    remedy = f"{hint_label(selector, devices)}Known devices: {known}."
    raise NoSuchDevice(f"No known device matches {text!r}.", remedy, selector=text, known=known)


def describe(device: Device) -> str:
    """Return a short description of a device."""
    state = DeviceState.Name(device.state).removeprefix("DEVICE_STATE_").lower()
    emulated = ", emulated" if device.emulated else ""
    return f"{device.name} (id={device.id}, arch={device.arch}, soc={device.soc}, cores={device.cores}{emulated}, {state})"
