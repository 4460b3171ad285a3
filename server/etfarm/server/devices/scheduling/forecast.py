"""Estimates of when waiting cells start, from how long equal runs took. A pure simulation."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import median
from typing import Final

from etfarm.server.devices.scheduling.pieces import Record
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.v1.device_pb2 import Device

MAX_KNOWN: Final = 20_000
"""Maximum number of kinds of runs whose durations are remembered."""

_LAST: Final = 9
"""Number of last durations of which the median is the estimate."""

_OVERDUE: Final = 2.0
"""A run that takes this many times its estimate longer is one whose end is unknown."""


@dataclass(frozen=True)
class Workload:
    """What a run does, as far as its duration depends on it. Texts that are equal for equal work; empty if unknown."""

    program: str = ""
    """The programs with what is measured of them."""
    model: str = ""
    """The models and recipes with what is measured of them, which other programs may have in common."""


NO_WORKLOAD: Final = Workload()


def kind_of(device: Device) -> str:
    """Return what devices of one kind have in common."""
    return f"{device.arch} {device.soc} {device.model} {device.cores}"


class Durations:
    """The durations of the last runs, by program and device, and by model and kind of device."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, str], deque[float]] = OrderedDict()

    def add(self, work: Workload, device: Device, duration_s: float) -> None:
        """Add the duration of a run that ended with a result."""
        for key in _keys(work, device):
            durations = self._known.setdefault(key, deque(maxlen=_LAST))
            durations.append(duration_s)
            self._known.move_to_end(key)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def estimate_s(self, work: Workload, device: Device) -> float | None:
        """Return the median duration of equal runs on the device, else on devices of its kind; None if there are none."""
        for key in _keys(work, device):
            if (durations := self._known.get(key)) is not None:
                return median(durations)
        return None


def _keys(work: Workload, device: Device) -> list[tuple[str, str, str]]:
    keys = [("program", work.program, device.id)] if work.program else []
    return [*keys, *([("model", work.model, kind_of(device))] if work.model else [])]


@dataclass(frozen=True)
class Busy:
    """A run that occupies a device."""

    device_id: str
    work: Workload
    started_s: float
    """When it started, in seconds since the epoch."""


def estimate_starts(
    cells: Iterable[Waiting],
    fitting: Callable[[Waiting], Collection[str]],
    works: Mapping[str, Workload],
    records: Mapping[str, Record],
    runs: Iterable[Busy],
    durations: Durations,
    now_s: float,
) -> dict[str, float]:
    """Return when cells start, in seconds since the epoch, by cell id. Cells for which that is unknown are left out.

    Each cell takes the device that is free first, if nothing else is submitted and every run takes as long as equal ones did. A
    device is of unknown availability after a run whose duration is unknown.

    Args:
        cells: the cells in their order.
        fitting: returns the ids of the devices that fit a cell.
        works: what cells do, by cell id.
        records: the devices by id.
        runs: the runs now.
        durations: durations of earlier runs.
        now_s: the present time.
    """
    free_s: dict[str, float] = {device_id: now_s for device_id, record in records.items() if record.is_healthy}
    for run in runs:
        record = records.get(run.device_id)
        if record is None or run.device_id not in free_s:
            continue
        estimate_s = durations.estimate_s(run.work, record.device)
        if estimate_s is None or now_s - run.started_s > (1 + _OVERDUE) * estimate_s:
            del free_s[run.device_id]
        else:
            free_s[run.device_id] = max(free_s[run.device_id], run.started_s + estimate_s)
    heaps: dict[object, list[tuple[float, bool, str]]] = {}
    starts: dict[str, float] = {}
    for cell in cells:
        heap = heaps.get(cell.kind)
        if heap is None:
            heap = heaps[cell.kind] = [
                (free_s[each], records[each].device.emulated, each) for each in fitting(cell) if each in free_s
            ]
            heapify(heap)
        while heap and free_s.get(heap[0][-1]) != heap[0][0]:
            _, emulated, device_id = heappop(heap)
            if device_id in free_s:
                heappush(heap, (free_s[device_id], emulated, device_id))
        if not heap:
            continue
        device_id = heap[0][-1]
        starts[cell.cell_id] = free_s[device_id]
        estimate_s = durations.estimate_s(works.get(cell.cell_id, NO_WORKLOAD), records[device_id].device)
        if estimate_s is None:
            del free_s[device_id]
        else:
            free_s[device_id] += estimate_s
    return starts
