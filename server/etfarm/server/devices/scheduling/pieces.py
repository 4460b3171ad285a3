"""The pieces of the board: devices with their use, and cells of one kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from etfarm.server.devices.scheduling.ranking import seniority_s
from etfarm.server.devices.scheduling.waiting import BUSY, IDLE, Party, Waiting, is_in_service, is_suspect, slots_of
from etfarm.v1.device_pb2 import Device

_CHANGING: Final = ("state", "attempt_id", "attempt_ids", "telemetry", "last_seen_time", "problem", "drain", "health")
"""Fields that do not matter to whether a cell fits the device."""

Place = tuple[float, tuple[int, int], str, Waiting]
"""A cell with its position among the cells of its kind and party: its seniority, its order, and its id."""


def place_of(cell: Waiting) -> Place:
    """Return a cell's place among the cells of its kind and party."""
    return seniority_s(cell), cell.order, cell.cell_id, cell


@dataclass(eq=False)
class Kind:
    """The waiting cells of one kind, and the devices that fit them."""

    sample: Waiting
    """Any of the cells: it fits the same devices as the others."""
    fitting: set[str] = field(default_factory=set)
    queues: dict[Party, list[Place]] = field(default_factory=dict)
    """The places of the cells of each party, first ones first."""


@dataclass(eq=False)
class Record:
    """A device with its use."""

    device: Device
    running: list[bool]
    """For each run: whether it is exclusive."""
    sent: frozenset[str]
    """Digests of the programs that it received."""
    in_service: bool = field(init=False)
    suspect: bool = field(init=False)
    slots: int = field(init=False)

    def __post_init__(self) -> None:
        self.in_service, self.suspect, self.slots = is_in_service(self.device), is_suspect(self.device), slots_of(self.device)

    @cached_property
    def identity(self) -> bytes:
        """Equal for descriptions that the same cells fit."""
        lasting = Device()
        lasting.CopyFrom(self.device)
        for name in _CHANGING:
            lasting.ClearField(name)
        return lasting.SerializeToString(deterministic=True)

    @property
    def is_healthy(self) -> bool:
        """Whether the device takes runs now or later, and nothing is held against it."""
        return self.in_service and not self.suspect

    @property
    def is_free(self) -> bool:
        """Whether the device takes any run now."""
        return self.in_service and not self.running and self.device.state == IDLE

    @property
    def is_shared(self) -> bool:
        """Whether the device runs only what is not exclusive, and may run several at the same time."""
        return (
            self.in_service
            and self.slots > 1
            and bool(self.running)
            and not any(self.running)
            and self.device.state in (IDLE, BUSY)
        )

    @property
    def has_slot(self) -> bool:
        """Whether the device takes a run that is not exclusive beside those that it runs."""
        return self.is_shared and len(self.running) < self.slots


class Pool:
    """The devices, and which of them take runs now."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.free: set[str] = set()
        """Devices that take any run now."""
        self.shared: set[str] = set()
        """Devices that run only what is not exclusive, and may run several at the same time."""
        self.holders: dict[str, set[str]] = {}
        """Devices by the digest of a program that they received."""

    def put(self, record: Record) -> Record | None:
        """Add a device or replace it; return the former record."""
        device_id = record.device.id
        former = self.records.get(device_id)
        self.records[device_id] = record
        self._hold(device_id, former.sent if former is not None else frozenset(), record.sent)
        self._classify(device_id, record)
        return former

    def discard(self, device_id: str) -> Record | None:
        """Remove a device and return its record; None if it is unknown."""
        if (record := self.records.pop(device_id, None)) is not None:
            self._hold(device_id, record.sent, frozenset())
            self.free.discard(device_id)
            self.shared.discard(device_id)
        return record

    def occupy(self, device_id: str, *, exclusive: bool) -> None:
        """Add a run to a device."""
        record = self.records[device_id]
        record.running.append(exclusive)
        self._classify(device_id, record)

    def _classify(self, device_id: str, record: Record) -> None:
        for devices, belongs in ((self.free, record.is_free), (self.shared, record.is_shared)):
            if belongs:
                devices.add(device_id)
            else:
                devices.discard(device_id)

    def _hold(self, device_id: str, before: frozenset[str], after: frozenset[str]) -> None:
        for program in before - after:
            holders = self.holders[program]
            holders.discard(device_id)
            if not holders:
                del self.holders[program]
        for program in after - before:
            self.holders.setdefault(program, set()).add(device_id)
