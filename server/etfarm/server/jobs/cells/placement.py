"""Placement of waiting cells and sessions on devices, whenever either changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import heapify, heappop, heappush
from typing import Final

from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Progressed, Runs
from etfarm.server.devices.scheduling import reasons
from etfarm.server.devices.scheduling.board import Board
from etfarm.server.devices.scheduling.forecast import NO_WORKLOAD, Busy, Durations, Workload, estimate_starts
from etfarm.server.devices.scheduling.pieces import Kind
from etfarm.server.devices.scheduling.ranking import AGEING_S, Shares, aged_priority
from etfarm.server.devices.scheduling.usage import Ledger, SentPrograms
from etfarm.server.devices.scheduling.waiting import Party, Waiting, open_to
from etfarm.server.jobs.cells.limits import DeadlineMissed, waited_too_long
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import QueuedRun
from etfarm.wire.selectors import Selector

_MANY: Final = 100
"""Number of cells and devices from which on placements are spaced."""

_PAUSE: Final = 9
"""Pause between two placements, as a multiple of the duration of the first. When 1,000 cells are cancelled, each frees its
device; the others need not be considered anew each time."""

_EXPLAIN_S: Final = 0.25
"""Pause before the reasons of many cells are determined again, which is more work than a placement."""

_SLICE_S: Final = 0.005
"""Time for which reasons are determined before other tasks continue."""

_LOOK_S: Final = 60.0
"""Longest time until limits of waiting are compared with the clock again, which may have been set."""


_ENDED: Final = 100
"""Number of requests that have ended whose limits of waiting are kept, since the removal of one takes a look at all."""


_ALL: Final = Selector(())


@dataclass(frozen=True)
class Subject:
    """What waits: for people, for estimates, and until when."""

    entry: QueuedRun = field(default_factory=QueuedRun)
    """Its names. The caller does not change the message afterwards."""
    work: Workload = NO_WORKLOAD
    since: datetime | None = None
    """Since when it waits for a device; now when None."""
    max_wait_s: float | None = None
    """Maximum time from `since` for which it waits."""


ANYTHING: Final = Subject()
"""What waits without names or limits."""


@dataclass
class _Request:
    """A cell in the queue, with its callbacks."""

    waiting: Waiting
    subject: Subject
    since_s: float
    attempt_id: str
    on_progress: Progressed
    on_wait: Callable[[str], None]
    chosen: asyncio.Future[str]
    why: str | None = None
    """The last reason that `on_wait` received; None before the first."""

    @property
    def longest_s(self) -> float | None:
        """When the time is over that it may wait, in seconds since the epoch; None without such a limit."""
        return None if self.subject.max_wait_s is None else self.since_s + self.subject.max_wait_s

    @property
    def expires_s(self) -> float | None:
        """When it gives up, in seconds since the epoch; None without a limit."""
        return min((each for each in (self.longest_s, self.waiting.deadline_s) if each is not None), default=None)


@dataclass(frozen=True)
class Use:
    """An attempt that used a device, of an earlier server."""

    party: Party
    device_id: str
    started_s: float
    ended_s: float
    work: Workload = NO_WORKLOAD
    """What it did; nothing is known of an attempt without a result."""
    programs: tuple[str, ...] = ()
    """Digests of its programs."""


class Placement:
    """The queue of what waits for a device.

    Args:
        now: returns the present time.
    """

    def __init__(self, registry: Registry, runs: Runs, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._registry = registry
        self._runs = runs
        self._now = now
        self._board = Board()
        self._ledger = Ledger()
        self._sent = SentPrograms()
        self._durations = Durations()
        self._live: dict[str, Busy] = {}
        """The attempts that occupy devices, by id."""
        self._requests: dict[str, _Request] = {}
        self._expiring: list[tuple[float, str]] = []
        """A heap of the times at which requests give up, with the ids of their cells."""
        self._alarm: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._explaining: asyncio.Handle | None = None
        self._unexplained: Iterator[None] | None = None
        self._explained_s = 0.0
        """How long it took to determine the last reasons."""
        registry.follow(self._follow)
        self._refresh(())

    async def device(
        self,
        waiting: Waiting,
        attempt_id: str,
        on_progress: Progressed,
        on_wait: Callable[[str], None],
        subject: Subject = ANYTHING,
    ) -> Device:
        """Wait until a device is free for the cell, occupy it with the attempt, and return it.

        Args:
            waiting: the cell, or session.
            attempt_id: the attempt's id.
            on_progress: called with the progress that the device reports.
            on_wait: called with the reason for waiting whenever that changes; empty if the cell only waits for its turn.
            subject: what waits, for people.

        Raises:
            DeadlineMissed, MAX_WAIT_OVER: no device was free in time.
        """
        now_s = self._now().timestamp()
        since_s = now_s if subject.since is None else subject.since.timestamp()
        chosen: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        request = _Request(waiting, subject, since_s, attempt_id, on_progress, on_wait, chosen)
        self._requests[waiting.cell_id] = request
        self._board.add(waiting)
        self._note_expiry(request)
        try:
            self.place()
            return self._registry.get(await chosen)
        except asyncio.CancelledError:
            self.free(attempt_id)
            raise
        finally:
            if self._requests.get(waiting.cell_id) is request:
                del self._requests[waiting.cell_id]
                self._board.remove(waiting.cell_id)

    def devices(self) -> list[Device]:
        """Return the known devices, sorted by name.

        Unlike the registry's, they are no copies, since a farm may have thousands: the caller does not change the messages. Their
        telemetry may be old.
        """
        return sorted(self._board.selected(_ALL), key=_by_name)

    def devices_for(self, selector: Selector, project: str) -> list[Device]:
        """Return those of `devices` that a selector matches and a project may use."""
        return sorted(open_to(project, self._board.selected(selector)), key=_by_name)

    def is_wanted(self, device: Device) -> bool:
        """Return whether a cell in the queue fits the device."""
        return self._board.is_wanted(device.id)

    def occupy(self, attempt_id: str, device_id: str, on_progress: Progressed) -> None:
        """Occupy a device with an attempt of the farm's own, past the queue."""
        self._runs.begin(attempt_id, device_id, on_progress, project="")
        self._refresh([device_id])

    def free(self, attempt_id: str) -> None:
        """Free the attempt's device for the next cell. Has no effect for an attempt without a device."""
        now_s = self._now().timestamp()
        succeeded = self._runs.has_succeeded(attempt_id)
        occupied = self._runs.device_of(attempt_id)
        live = self._live.pop(attempt_id, None)
        self._runs.end(attempt_id)
        self._ledger.end(attempt_id, now_s)
        if live is not None and succeeded and (record := self._board.pool.records.get(live.device_id)) is not None:
            self._durations.add(live.work, record.device, max(0.0, now_s - live.started_s))
        if (device_id := occupied or (live.device_id if live is not None else None)) is not None:
            self._refresh([device_id])
        self.place()

    def adopt(self, attempt_id: str, device_id: str, party: Party, work: Workload, started: datetime) -> None:
        """Count an attempt that an earlier server started."""
        self._ledger.begin(attempt_id, party, started.timestamp())
        self._live[attempt_id] = Busy(device_id, work, started.timestamp())
        self._refresh([device_id])

    def remember(self, use: Use) -> None:
        """Count an attempt that ended before this server started. Attempts come in the order of their ends."""
        self._ledger.add(use.party, max(0.0, use.ended_s - use.started_s), use.ended_s)
        if (record := self._board.pool.records.get(use.device_id)) is not None:
            self._sent.add(use.device_id, use.programs)
            self._durations.add(use.work, record.device, max(0.0, use.ended_s - use.started_s))
            self._refresh([use.device_id])

    def note_sent(self, device_id: str, programs: Collection[str]) -> None:
        """Note that a device received programs, given by digest."""
        self._sent.add(device_id, programs)

    def place(self) -> None:
        """Assign all cells that can be assigned, or schedule that for soon if a large placement has just run."""
        if self._due is not None:
            return
        loop = asyncio.get_running_loop()
        if not self._is_large or loop.time() >= self._next_s:
            self._place()
        else:
            self._due = loop.call_at(self._next_s, self._place)

    def entries(self) -> list[QueuedRun]:
        """Return all that waits, in order, with estimates of when it starts."""
        now_s = self._now().timestamp()
        lately = self._ledger.lately(now_s)
        shares = Shares(lately)
        cells = list(self._board.in_order(lately))
        works = {cell_id: request.subject.work for cell_id, request in self._requests.items()}
        starts = estimate_starts(
            cells, self._board.fitting, works, self._board.pool.records, self._live.values(), self._durations, now_s
        )
        entries: list[QueuedRun] = []
        for rank, cell in enumerate(cells, 1):
            request, entry = self._requests[cell.cell_id], QueuedRun()
            entry.CopyFrom(request.subject.entry)
            entry.rank, entry.project, entry.owner, entry.priority = rank, cell.project, cell.owner, cell.priority
            entry.reservation_id, entry.exclusive = cell.reservation, cell.exclusive
            entry.aged_priority = aged_priority(cell, now_s)
            entry.share_penalty = shares.delay_s(cell.party) / AGEING_S
            entry.waiting_for = request.why or ""
            entry.wait_start_time.FromNanoseconds(round(request.since_s * 1e9))
            if (expires_s := request.expires_s) is not None:
                entry.expire_time.FromNanoseconds(round(expires_s * 1e9))
            if (start_s := starts.get(cell.cell_id)) is not None:
                entry.start_estimate_time.FromNanoseconds(round(start_s * 1e9))
            entries.append(entry)
        return entries

    @property
    def _is_large(self) -> bool:
        return len(self._requests) + len(self._board.pool.records) >= 2 * _MANY

    def _follow(self, device_ids: Collection[str]) -> None:
        self._refresh(device_ids)
        self.place()

    def _refresh(self, device_ids: Collection[str]) -> None:
        """Read devices from the registry again; all without ids."""
        known = self._registry.known(device_ids) if device_ids else {each.id: each for each in self._registry.devices()}
        for device_id in set(device_ids or self._board.pool.records) - known.keys():
            self._board.discard(device_id)
            self._sent.forget(device_id)
        for device_id, device in known.items():
            self._board.put(device, self._runs.exclusive_on(device_id), self._sent.of(device_id))

    def _place(self) -> None:
        self._due = None
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._assign()
        ended_s = loop.time()
        self._next_s = ended_s + _PAUSE * (ended_s - began_s)
        if not self._is_large:
            for _ in self._explain(self._board.take_unexplained()):
                pass
        elif self._explaining is None:
            self._explaining = loop.call_later(max(_EXPLAIN_S, _PAUSE * self._explained_s), self._explain_slice)
            self._explained_s = 0.0

    def _assign(self) -> None:
        """Assign all cells that can be assigned now, after those that have waited too long gave up."""
        now_s = self._now().timestamp()
        self._expire(now_s)
        while assignments := self._board.assign(self._ledger.lately(now_s)):
            for assignment in assignments:
                self._occupy(self._requests.pop(assignment.cell_id), assignment.device_id, now_s)

    def _occupy(self, request: _Request, device_id: str, now_s: float) -> None:
        """Occupy a device with a request's attempt, unless its caller is being cancelled."""
        waiting, attempt_id = request.waiting, request.attempt_id
        if not request.chosen.done():
            self._runs.begin(attempt_id, device_id, request.on_progress, project=waiting.project, exclusive=waiting.exclusive)
            self._ledger.begin(attempt_id, waiting.party, now_s)
            self._live[attempt_id] = Busy(device_id, request.subject.work, now_s)
            request.chosen.set_result(device_id)
        self._refresh([device_id])

    def _note_expiry(self, request: _Request) -> None:
        """Add a request to those that give up at some time. Requests that have ended are removed once they are the most."""
        if request.expires_s is None:
            return
        heappush(self._expiring, (request.expires_s, request.waiting.cell_id))
        if len(self._expiring) > _ENDED + 2 * len(self._requests):
            limits = ((each.expires_s, cell_id) for cell_id, each in self._requests.items())
            self._expiring = [(expires_s, cell_id) for expires_s, cell_id in limits if expires_s is not None]
            heapify(self._expiring)

    def _expire(self, now_s: float) -> None:
        """Let requests fail that have waited too long, and set the alarm for the next one."""
        while self._expiring and self._expiring[0][0] <= now_s:
            _, cell_id = heappop(self._expiring)
            request = self._requests.get(cell_id)
            if request is None or request.expires_s is None or request.expires_s > now_s:
                continue
            del self._requests[cell_id]
            self._board.remove(cell_id)
            if request.chosen.done():
                continue  # its caller is being cancelled
            is_late = request.waiting.deadline_s is not None and request.waiting.deadline_s <= now_s
            limit = DeadlineMissed if is_late else waited_too_long
            request.chosen.set_exception(limit(request.why or "", now_s - request.since_s))
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._expiring:
            left_s = min(max(self._expiring[0][0] - now_s, 0.001), _LOOK_S)
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._place)

    def _explain_slice(self) -> None:
        """Inform some cells of the reasons why they wait, and continue later if there are more."""
        loop = asyncio.get_running_loop()
        self._explaining = None
        if self._unexplained is None:
            self._unexplained = self._explain(self._board.take_unexplained())
        began_s = loop.time()
        while loop.time() - began_s < _SLICE_S:
            if next(self._unexplained, self) is self:
                self._unexplained = None
                break
        else:
            self._explaining = loop.call_soon(self._explain_slice)
        self._explained_s += loop.time() - began_s

    def _explain(self, kinds: Collection[Kind]) -> Iterator[None]:
        """Inform the waiting cells of some kinds why they wait, if that has changed; yield after each cell and each kind."""
        busy = {device_id for device_id, record in self._board.pool.records.items() if record.running}
        for kind in kinds:
            of_kind = reasons.why_waiting(kind.sample, self._board.matching(kind.sample), busy)
            for cell_id in [place[2] for queue in kind.queues.values() for place in queue]:
                if (request := self._requests.get(cell_id)) is not None:
                    limit = reasons.must_start_by(request.waiting, request.longest_s)
                    why = "; ".join(filter(None, [of_kind, limit]))
                    if why != (request.why or ""):
                        request.why = why
                        request.on_wait(why)
                yield
            yield


def _by_name(device: Device) -> tuple[str, str]:
    return device.name, device.id
