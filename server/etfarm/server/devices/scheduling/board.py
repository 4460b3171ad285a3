"""The board: all waiting cells and all devices, indexed so that a change costs what it affects and not what there is.

Cells of one kind fit the same devices, so that the devices of a kind are determined once and updated with each device. After
each round no waiting cell could be placed on any device. Therefore only kinds that fit a device that changed since, and kinds
of new cells, are considered in the next round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from etfarm.server.devices.scheduling.device_index import DeviceIndex
from etfarm.server.devices.scheduling.pieces import Kind, Pool, Record, place_of
from etfarm.server.devices.scheduling.ranking import Shares
from etfarm.server.devices.scheduling.rounds import Round
from etfarm.server.devices.scheduling.waiting import Party, Waiting
from etfarm.v1.device_pb2 import Device
from etfarm.wire.selectors import Selector


@dataclass(frozen=True)
class Assignment:
    """A device that is assigned to a cell."""

    cell_id: str
    device_id: str


class Board:
    """The waiting cells and the devices. Equal contents give equal assignments, in whatever order they were added."""

    def __init__(self) -> None:
        self.cells: dict[str, Waiting] = {}
        """The waiting cells, by id."""
        self.pool = Pool()
        self._index = DeviceIndex()
        self._kinds: dict[Hashable, Kind] = {}
        self._kinds_of: dict[str, set[Kind]] = {}
        """The kinds that fit a device, by the device's id."""
        self._affected: set[Kind] = set()
        """Kinds to consider in the next round."""
        self._unexplained: set[Kind] = set()
        """Kinds whose reason to wait may have changed."""

    def add(self, cell: Waiting) -> None:
        """Add a waiting cell."""
        key = cell.kind
        if (kind := self._kinds.get(key)) is None:
            kind = self._kinds[key] = Kind(cell)
            for device in self.selected(cell.selector):
                if cell.fits_selected(device):
                    kind.fitting.add(device.id)
                    self._kinds_of[device.id].add(kind)
        insort(kind.queues.setdefault(cell.party, []), place_of(cell))
        self.cells[cell.cell_id] = cell
        self._affected.add(kind)
        self._unexplained.add(kind)

    def remove(self, cell_id: str) -> None:
        """Remove a cell. Has no effect for a cell that does not wait."""
        if cell_id not in self.cells:
            return
        cell = self.cells[cell_id]
        if cell.exclusive and self.pool.shared:
            # Cells after it may use the device that was kept for it.
            for device_id in self._kinds[cell.kind].fitting & self.pool.shared:
                self._affected |= self._kinds_of[device_id]
        self._take_off(cell)

    def put(self, device: Device, running: Iterable[bool] = (), sent: Collection[str] = ()) -> None:
        """Add a device, or replace what is known of it.

        Args:
            device: the device; the board keeps the message.
            running: for each run on it, whether it is exclusive.
            sent: digests of the programs that it received.
        """
        record = Record(device, list(running), frozenset(sent))
        former = self.pool.put(record)
        kinds = self._kinds_of.setdefault(device.id, set())
        if former is None or former.identity != record.identity:
            self._index.put(device)
            for kind in self._kinds.values():
                if kind.sample.fits(device):
                    kind.fitting.add(device.id)
                    kinds.add(kind)
                elif kind in kinds:
                    kind.fitting.discard(device.id)
                    kinds.discard(kind)
                    self._note([kind])
        is_changed = former is not None and former.is_healthy != record.is_healthy
        if record.is_free or record.is_shared or is_changed:
            self._affected |= kinds
        self._unexplained |= kinds

    def discard(self, device_id: str) -> None:
        """Remove a device. Has no effect for an unknown one."""
        if self.pool.discard(device_id) is None:
            return
        self._index.remove(device_id)
        kinds = self._kinds_of.pop(device_id)
        for kind in kinds:
            kind.fitting.discard(device_id)
        self._note(kinds)

    def assign(self, lately: Mapping[Party, float]) -> list[Assignment]:
        """Assign the cells that can be assigned now, remove them, and occupy their devices. Uses neither I/O nor a clock.

        Args:
            lately: device time that parties have used lately, in seconds.
        """
        affected, self._affected = self._affected, set()
        if not affected:
            return []
        # A cell keeps one shared device, and which one depends on the cells of other kinds before it.
        for device_id in self.pool.shared:
            affected |= self._kinds_of[device_id]
        placed = list(Round(self.pool, affected, Shares(lately)).assignments())
        for cell, device_id in placed:
            self._take_off(cell)
            self._unexplained |= self._kinds_of[device_id]
        return [Assignment(cell.cell_id, device_id) for cell, device_id in placed]

    def in_order(self, lately: Mapping[Party, float]) -> Iterator[Waiting]:
        """Yield the waiting cells in the order in which they would go if each device fitted each."""
        return Round(self.pool, self._kinds.values(), Shares(lately)).in_order()

    def take_unexplained(self) -> list[Kind]:
        """Return the kinds whose reason to wait may have changed since the last call."""
        kinds, self._unexplained = self._unexplained, set()
        return [kind for kind in kinds if kind.queues]

    def matching(self, cell: Waiting) -> list[Device]:
        """Return the devices that are ones for a cell, apart from their number of cpus and their reservation."""
        return [device for device in self.selected(cell.selector) if cell.suits(device)]

    def selected(self, selector: Selector) -> list[Device]:
        """Return the devices that a selector matches. They are the board's own messages."""
        return self._index.matching(selector, self.pool.records)

    def fitting(self, cell: Waiting) -> Collection[str]:
        """Return the ids of the devices that fit a waiting cell."""
        return self._kinds[cell.kind].fitting

    def is_wanted(self, device_id: str) -> bool:
        """Return whether a waiting cell fits a device."""
        return bool(self._kinds_of.get(device_id))

    def _take_off(self, cell: Waiting) -> None:
        del self.cells[cell.cell_id]
        kind = self._kinds[cell.kind]
        queue = kind.queues[cell.party]
        del queue[bisect_left(queue, place_of(cell))]
        if queue:
            return
        del kind.queues[cell.party]
        if not kind.queues:
            del self._kinds[cell.kind]
            for device_id in kind.fitting:
                self._kinds_of[device_id].discard(kind)

    def _note(self, kinds: Collection[Kind]) -> None:
        self._affected |= set(kinds)
        self._unexplained |= set(kinds)
