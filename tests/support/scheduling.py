"""The assignment of waiting cells to devices as a function of everything that it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from etfarm.server.devices.scheduling.board import Assignment, Board
from etfarm.server.devices.scheduling.usage import NO_USAGE, Usage
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.v1.device_pb2 import Device


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
