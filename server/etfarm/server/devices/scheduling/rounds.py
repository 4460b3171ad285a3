"""One round of scheduling: cells in their order, each with the best device that is left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from etfarm.server.devices.scheduling.pieces import Kind, Pool, Record
from etfarm.server.devices.scheduling.ranking import Shares
from etfarm.server.devices.scheduling.waiting import Party, Waiting

_Preference = tuple[bool, bool, bool, bool, str]
"""Suspect, emulated, idle (for a run that shares a device), without any program so far, id: the least is the best."""

_Takes = Callable[[str, Kind], bool]
"""Function that returns whether a device takes a cell of a kind now."""


_Head = tuple[float, tuple[int, int], str, int, Kind]
"""The first cell of a kind and party that is left: its place, its index in the queue, and its kind."""


class Round:
    """The assignment of cells of some kinds to the devices of a pool."""

    def __init__(self, pool: Pool, kinds: Iterable[Kind], shares: Shares) -> None:
        self._pool = pool
        self._shares = shares
        self._heads: dict[Party, list[_Head]] = {}
        """Heaps of the first cells of each party, one for each kind."""
        self._parties: list[tuple[float, tuple[int, int], str, Party]] = []
        """A heap of the parties by the rank of their first cell."""
        self._choices: dict[Kind, _Choice] = {}
        self._kept: set[str] = set()
        """Shared devices that take no more runs, since a cell that must be alone waits for one."""
        for kind in kinds:
            for party, queue in kind.queues.items():
                self._heads.setdefault(party, []).append((*queue[0][:3], 0, kind))
        for party, heads in self._heads.items():
            heapify(heads)
            self._push(party)

    def assignments(self) -> Iterator[tuple[Waiting, str]]:
        """Yield cells with their devices, which are occupied in the pool.

        A cell that waits does not block others that could run elsewhere. A cell that must be alone and finds no idle device keeps
        a device with runs that are not exclusive: cells after it do not join them, so that it comes to its turn.
        """
        exhausted: set[Kind] = set()
        while self._parties and self._has_room():
            party = self._pop()
            _, _, _, index, kind = self._heads[party][0]
            if kind in exhausted:
                self._advance(party, len(kind.queues[party]))
                continue
            cell = kind.queues[party][index][3]
            device_id = self._choose(kind, cell)
            if device_id is not None:
                self._shares.charge(party)
                self._occupy(cell, device_id)
                self._advance(party, index + 1)
                yield cell, device_id
            elif cell.avoid or (cell.exclusive and self._keep(kind, cell)):
                self._advance(party, index + 1)
            else:
                exhausted.add(kind)
                self._advance(party, len(kind.queues[party]))

    def in_order(self) -> Iterator[Waiting]:
        """Yield the cells in the order in which they would go if every device fitted each of them."""
        while self._parties:
            party = self._pop()
            _, _, _, index, kind = self._heads[party][0]
            self._shares.charge(party)
            self._advance(party, index + 1)
            yield kind.queues[party][index][3]

    def _push(self, party: Party) -> None:
        seniority_s, order, cell_id, _, _ = self._heads[party][0]
        heappush(self._parties, (seniority_s + self._shares.delay_s(party), order, cell_id, party))

    def _pop(self) -> Party:
        """Remove and return the party of the first cell, whose rank may have become later since it was pushed, never earlier."""
        while True:
            rank_s, _, _, party = heappop(self._parties)
            if self._heads[party][0][0] + self._shares.delay_s(party) <= rank_s:
                return party
            self._push(party)

    def _advance(self, party: Party, index: int) -> None:
        """Replace a party's first cell by that at an index of the same queue, or by one of another kind if there is none."""
        heads = self._heads[party]
        kind = heads[0][4]
        queue = kind.queues[party]
        if index < len(queue):
            heapreplace(heads, (*queue[index][:3], index, kind))
        else:
            heappop(heads)
        if heads:
            self._push(party)

    def _has_room(self) -> bool:
        pool = self._pool
        return bool(pool.free) or any(pool.records[each].has_slot for each in pool.shared if each not in self._kept)

    def _occupy(self, cell: Waiting, device_id: str) -> None:
        self._pool.occupy(device_id, exclusive=cell.exclusive)
        record = self._pool.records[device_id]
        if record.has_slot:
            for kind, choice in self._choices.items():
                if not kind.sample.exclusive and device_id in kind.fitting:
                    choice.push(record)

    def _choose(self, kind: Kind, cell: Waiting) -> str | None:
        """Return the best device for a cell; None if none takes it now."""
        if cell.avoid:
            return self._choose_avoiding(kind, cell)
        if (choice := self._choices.get(kind)) is None:
            choice = self._choices[kind] = _Choice(kind, self._pool)
        best = choice.best(cell.program, self._takes)
        if best is None or (best.suspect and self._has_healthy(kind, cell)):
            return None
        return best.device.id

    def _choose_avoiding(self, kind: Kind, cell: Waiting) -> str | None:
        """Return the best device, devices on which the cell failed last."""
        records = [self._pool.records[each] for each in self._available(kind) if self._takes(each, kind)]
        if not records:
            return None
        best = min(records, key=lambda record: (record.device.id in cell.avoid, *_key(record, cell)))
        return None if best.suspect and self._has_healthy(kind, cell) else best.device.id

    def _available(self, kind: Kind) -> Collection[str]:
        pool = self._pool
        available = pool.free if kind.sample.exclusive else pool.free | pool.shared
        return _common(kind.fitting, available)

    def _takes(self, device_id: str, kind: Kind) -> bool:
        """Return whether a device takes a cell of a kind now."""
        if device_id in self._pool.free:
            return True
        return not kind.sample.exclusive and device_id not in self._kept and self._pool.records[device_id].has_slot

    def _has_healthy(self, kind: Kind, cell: Waiting) -> bool:
        """Return whether a device fits, now or later, that is not suspect and on which the cell has not failed."""
        records = self._pool.records
        return any(records[each].is_healthy and each not in cell.avoid for each in kind.fitting)

    def _keep(self, kind: Kind, cell: Waiting) -> bool:
        """Keep a shared device for a cell that must be alone; return False if none is left."""
        left = [self._pool.records[each] for each in _common(kind.fitting, self._pool.shared) if each not in self._kept]
        if left and all(record.suspect for record in left) and self._has_healthy(kind, cell):
            return False
        if not left:
            return False
        best = min(
            left,
            key=lambda record: (
                record.device.id in cell.avoid, record.suspect, record.device.emulated, len(record.running), record.device.id
            ),
        )  # fmt: skip
        self._kept.add(best.device.id)
        return True


class _Choice:
    """The devices that a kind's cells may take in this round, best ones first."""

    def __init__(self, kind: Kind, pool: Pool) -> None:
        self._kind = kind
        self._pool = pool
        self._is_shared = not kind.sample.exclusive
        available = pool.free | pool.shared if self._is_shared else pool.free
        self._all = self._heap(_common(kind.fitting, available))
        self._holding: dict[str, list[_Preference]] = {}
        """Devices that received a program, by its digest."""

    def push(self, record: Record) -> None:
        """Note that a device is preferred now, since it is shared."""
        preference = self._preference(record)
        heappush(self._all, preference)
        for program, heap in self._holding.items():
            if program in record.sent:
                heappush(heap, preference)

    def best(self, program: str, takes: _Takes) -> Record | None:
        """Return the best device that takes a cell now.

        Args:
            program: digest of the cell's program.
            takes: returns whether a device takes a cell of a kind now.
        """
        first = self._first(self._all, takes)
        if first is None or program not in self._pool.holders:
            return first
        if program not in self._holding:
            having = _common(self._pool.holders[program], self._kind.fitting)
            self._holding[program] = self._heap([each for each in having if takes(each, self._kind)])
        holding = self._first(self._holding[program], takes)
        if holding is None:
            return first
        return min(first, holding, key=lambda record: self._preference_of(record, program))

    def _first(self, heap: list[_Preference], takes: _Takes) -> Record | None:
        while heap:
            record = self._pool.records[heap[0][-1]]
            if takes(record.device.id, self._kind) and heap[0] == self._preference(record):
                return record
            heappop(heap)
        return None

    def _heap(self, device_ids: Collection[str]) -> list[_Preference]:
        heap = [self._preference(self._pool.records[device_id]) for device_id in device_ids]
        heapify(heap)
        return heap

    def _preference_of(self, record: Record, program: str) -> tuple[bool, bool, bool, bool, bool, str]:
        suspect, emulated, idle, new, device_id = self._preference(record)
        return suspect, emulated, idle, program not in record.sent, new, device_id

    def _preference(self, record: Record) -> _Preference:
        device = record.device
        return record.suspect, device.emulated, self._is_shared and not record.is_shared, not record.sent, device.id


def _key(record: Record, cell: Waiting) -> tuple[bool, bool, bool, bool, bool, str]:
    """Return what orders devices for a cell: the least is the best."""
    device = record.device
    is_spread = not cell.exclusive and not record.is_shared
    return record.suspect, device.emulated, is_spread, cell.program not in record.sent, not record.sent, device.id


def _common(one: Collection[str], other: Collection[str]) -> Collection[str]:
    """Return the ids in both collections."""
    few, many = (one, other) if len(one) <= len(other) else (other, one)
    return [each for each in few if each in many]
