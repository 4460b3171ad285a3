"""The board: all waiting cells and all devices, indexed so that a change costs what it affects and not what there is.

Cells of one kind fit the same devices, so that the devices of a kind are determined once and updated with each device. After
each round no waiting cell could be placed on any device. Therefore only kinds that fit a device that changed since, and kinds
of new cells, are considered in the next round.

Devices are also indexed by the values that selectors compare, so that a selector is not evaluated for every device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from etfarm.server.devices.scheduling.pieces import Kind, Pool, Record, place_of
from etfarm.server.devices.scheduling.ranking import Shares
from etfarm.server.devices.scheduling.rounds import Round
from etfarm.server.devices.scheduling.waiting import Party, Waiting
from etfarm.v1.device_pb2 import Device
from etfarm.wire.selectors import Selector, Term

_KEYS: Final = ("id", "name", "arch", "feature", "backend", "emulated")
"""Keys whose `=` compares whole values; labels are further ones."""

_MAX_SELECTORS: Final = 4096
"""Maximum number of selectors whose devices are remembered."""


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


class DeviceIndex:
    """The ids of devices by key and value."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, object], set[str]] = {}
        self._values: dict[str, frozenset[tuple[str, object]]] = {}
        """The indexed values of each device."""
        self._matching: dict[Selector, list[str]] = {}
        """The ids of the devices that selectors match, until a device changes."""

    def put(self, device: Device) -> None:
        """Add a device, or replace its former values."""
        self._matching.clear()
        former, values = self._values.get(device.id, frozenset()), frozenset(_values_of(device))
        if values == former:
            return
        self._values[device.id] = values
        for value in former - values:
            self._drop(value, device.id)
        for value in values - former:
            self._ids.setdefault(value, set()).add(device.id)

    def remove(self, device_id: str) -> None:
        """Remove a device."""
        self._matching.clear()
        for value in self._values.pop(device_id, frozenset()):
            self._drop(value, device_id)

    def matching(self, selector: Selector, devices: Mapping[str, Record]) -> list[Device]:
        """Return the devices that a selector matches.

        Args:
            selector: the selector.
            devices: all indexed devices.
        """
        if (known := self._matching.get(selector)) is None:
            if len(self._matching) >= _MAX_SELECTORS:
                self._matching.clear()
            known = self._matching[selector] = self._select(selector, devices)
        return [devices[each].device for each in known]

    def _select(self, selector: Selector, devices: Mapping[str, Record]) -> list[str]:
        having: list[Collection[str]] = []
        rest: list[Term] = []
        for term in selector.terms:
            if term.operator == "=" and (term.key in _KEYS or term.key.startswith("label.")):
                having.append(self._ids.get((term.key, _folded(term.value)), frozenset()))
            else:
                rest.append(term)
        few = min(having, key=len, default=self._values.keys())
        remaining = Selector(tuple(rest))
        selected = [each for each in few if all(each in ids for ids in having)]
        return [each for each in selected if remaining.matches(devices[each].device)] if rest else selected

    def _drop(self, value: tuple[str, object], device_id: str) -> None:
        having = self._ids[value]
        having.discard(device_id)
        if not having:
            del self._ids[value]


def _values_of(device: Device) -> Iterator[tuple[str, object]]:
    yield "id", _folded(device.id)
    yield "name", _folded(device.name)
    yield "arch", _folded(device.arch)
    yield "emulated", device.emulated
    for feature in device.features:
        yield "feature", _folded(feature)
    for backend in device.backends:
        yield "backend", _folded(backend)
    for key, value in device.labels.items():
        yield f"label.{key}", _folded(value)


def _folded(value: object) -> object:
    """Return a text in lower case, since selectors ignore the case of values."""
    return value.lower() if isinstance(value, str) else value
