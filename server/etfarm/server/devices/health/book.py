"""The health of all devices, in memory and in the database: what happens to a device goes in, its standing comes out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Final

import structlog
from sqlalchemy import ColumnElement, Connection, and_, delete, select

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.health import baseline, standing
from etfarm.server.devices.health.baseline import BASELINE_RUNS, Pace
from etfarm.server.devices.health.standing import HealthPolicy, Standing
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.cut import shorten
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.device_pb2 import Device, HealthEvent, HealthEventKind, HealthRun, HealthState
from etfarm.wire.errors import EtfarmError, Fault
from etfarm.wire.escapes import in_a_line

log = structlog.get_logger()

_FAULT: Final = HealthEventKind.HEALTH_EVENT_KIND_FAULT
_RUN: Final = HealthEventKind.HEALTH_EVENT_KIND_RUN
_CLEARED: Final = HealthEventKind.HEALTH_EVENT_KIND_CLEARED
_RECOVERED: Final = HealthEventKind.HEALTH_EVENT_KIND_RECOVERED
_POWER_CYCLED: Final = HealthEventKind.HEALTH_EVENT_KIND_POWER_CYCLED

_MAX_MESSAGE: Final = 500
"""Maximum length of an event's message, which may be an agent's or a command's text."""
_WRITTEN_S: Final = 5.0
"""Maximum time for which a reader waits until changes are written: a database may be away for long."""
DEFAULT_WEIGHT: Final = 1.0
"""Weight of a device fault whose reason has none of its own."""

LOST_WEIGHT: Final = 0.3
"""Weight of an attempt whose agent or link was lost: that happens to a board with a good processor, too."""

WEIGHTS: Final = {
    # The runner fails without any program.
    "DEVICE_SELF_TEST_FAILED": 1.5,
    "ATTEMPT_LOST": LOST_WEIGHT,
    "DEVICE_GONE": LOST_WEIGHT,
    "SESSION_LOST": LOST_WEIGHT,
    "TRANSFER_TIMED_OUT": LOST_WEIGHT,
    # The server and the agent disagreed for a moment on what runs; nothing failed.
    "DEVICE_BUSY": 0.0,
    "DEVICE_OFFLINE": 0.0,
    "DEVICE_UNKNOWN": 0.0,
}

FREE_CAUSES: Final = frozenset({"stopped", "server-restart"})
"""Causes of a lost attempt, as its metadata `cause` has them, that say nothing about the device: its agent was stopped on
purpose, or the server itself was away and cannot know when the agent left."""
MAX_EVENTS: Final = 600
"""Maximum number of events kept for each device, besides the medians of health runs."""
MAX_MEDIANS: Final = 400
"""Maximum number of health runs with a median kept for each device, besides those of the baseline: a year of one a day."""

_EVENTS: Final = schema.health_events


@dataclass(frozen=True)
class PowerCycle:
    """A power cycle that is recorded as begun."""

    event: HealthEvent
    number: int | None
    """Number of the event in the database; None if it could not be written."""


class HealthBook:
    """The standings of the devices, and the events that changed them.

    A change takes effect at once; then it is written. A full disk delays no job: the change is logged, and its event is lost.
    """

    def __init__(self, database: Database, now: Callable[[], datetime], policy: HealthPolicy | None = None) -> None:
        self.policy = policy or HealthPolicy()
        self._records = HealthRecords(database)
        self._now = now
        self._began_at = now()
        self._standings: dict[str, Standing] = {}
        self._writing: dict[asyncio.Future[None], str] = {}
        """The changes that are being written, by what ends with them, with their devices."""
        self._on_change: list[Callable[[str], None]] = []
        self._on_fault: list[Callable[[str], None]] = []
        self._on_quarantined: list[Callable[[str], None]] = []

    async def load(self) -> None:
        """Load the standings from the database."""
        self._standings.update(await self._records.load())

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Register a function to call with a device's id whenever its state changes."""
        self._on_change.append(listener)

    def on_fault(self, listener: Callable[[str], None]) -> None:
        """Register a function to call with a device's id after each fault, while its attempt still occupies the device."""
        self._on_fault.append(listener)

    def on_quarantined(self, listener: Callable[[str], None]) -> None:
        """Register a function to call with a device's id when it is quarantined."""
        self._on_quarantined.append(listener)

    def of(self, device_id: str) -> Standing:
        """Return a device's standing."""
        return self._standings.get(device_id) or Standing(since=self._began_at)

    def known(self) -> Collection[str]:
        """Return the ids of the devices about which something is known."""
        return list(self._standings)

    def apply(self, device: Device) -> None:
        """Fill a device's health, which never comes from its agent."""
        device.ClearField("health")
        known, health = self.of(device.id), device.health
        health.state, health.reason = known.state, known.reason
        if device.id in self._standings:
            health.start_time.FromDatetime(known.since)
        health.fault_score = known.score_at(self._now(), self.policy)
        if known.last_run_at is not None:
            health.last_run_time.FromDatetime(known.last_run_at)
        if (due := standing.due(known, self.policy)) is not None:
            health.next_run_time.FromDatetime(due[0])

    async def record_fault(self, device_id: str, error: EtfarmError, *, attempt_id: str = "", project: str = "") -> None:
        """Record the error with which an attempt or a session ended. An error that does not count against the device is ignored.

        Call it before the device is free for another attempt.
        """
        weight = weight_of(error)
        if not weight:
            return
        text, at = _line(error.message), self._now()
        # The standing is shown to everyone who sees the device, and the message may have names and output of a project's program.
        changed = standing.after_fault(self.of(device_id), weight, error.reason if project else text, at, self.policy)
        event = HealthEvent(device_id=device_id, kind=_FAULT, reason=error.reason, message=text, attempt_id=attempt_id)
        log.warning("a device fault", device=device_id, attempt=attempt_id, reason=error.reason, weight=weight)
        was = self._change(device_id, changed, event, at)
        for listener in self._on_fault:
            listener(device_id)
        await self._write(device_id, was, changed, event, project=project)

    async def record_run(
        self,
        device_id: str,
        run: HealthRun,
        error: EtfarmError | None,
        series: str,
        attempt_id: str,
        *,
        was_idle: bool = True,
    ) -> HealthEvent:
        """Record a health run that came to a result, and return its event.

        Args:
            run: what was measured; `passed` and `baseline_ns` are set here.
            error: what was wrong; None if the run passed.
            series: what its median depends on; empty if there is no VALID median.
            was_idle: whether the device was idle before the run, and nobody wanted it until the run's end.
        """
        at, before = self._now(), self.of(device_id)
        event = HealthEvent(device_id=device_id, kind=_RUN, attempt_id=attempt_id, run=run)
        event.run.passed = error is None
        if error is not None:
            event.reason, event.message, series = error.reason, _line(error.message), ""
            changed = standing.after_failed(before, event.message, at, self.policy)
        else:
            slower = before.slower
            uncounted = standing.why_uncounted(before, run.trigger, at, self.policy, was_idle=was_idle)
            if uncounted is not None and run.HasField("p50_ns"):
                event.run.doubts.append(uncounted)
            if series:
                series = hashlib.sha256(f"{device_id}|{series}".encode()).hexdigest()[:32]
                paces = await self._records.paces(device_id, series, before.cleared_at)
                if uncounted is None:
                    paces.append(baseline.Pace(at, run.p50_ns))
                    compared = baseline.compare(paces)
                    # A new series says nothing against the device.
                    is_slower = compared is not None and compared.is_slower(was_slower=bool(slower))
                    slower = compared.reason if compared is not None and is_slower else ""
                else:
                    series = ""
                if (usual_ns := baseline.usual_ns(paces)) is not None:
                    event.run.baseline_ns = usual_ns
            before = self.of(device_id)  # faults may have been recorded in the meantime
            changed = standing.after_passed(before, slower, at, self.policy, is_scheduled=uncounted is None)
            event.message = changed.slower or "it passed"
        was = self._change(device_id, changed, event, at)
        await self._write(device_id, was, changed, event, series=series)
        return event

    async def record_power_cycle(self, device_id: str, message: str) -> PowerCycle:
        """Record that the command that switches a device off and on is called, before it is."""
        known, at = self.of(device_id), self._now()
        event = HealthEvent(device_id=device_id, kind=_POWER_CYCLED, message=_line(message))
        was = self._change(device_id, known, event, at)
        return PowerCycle(event, await self._write(device_id, was, known, event))

    async def record_power_cycled(self, cycle: PowerCycle, message: str, exit_code: int | None) -> None:
        """Record how the command of a recorded power cycle ended."""
        if cycle.number is None:
            return
        event = HealthEvent()
        event.CopyFrom(cycle.event)
        event.message = _line(message)
        if exit_code is not None:
            event.exit_code = exit_code
        try:
            await self._records.replace_event(cycle.number, event)
        except EtfarmError as error:
            log.error("the end of a power cycle could not be written", device=event.device_id, error=error.message)

    async def power_cycles(self, since: datetime) -> Sequence[tuple[str, datetime]]:
        """Return the devices that were power-cycled after a time, and when, oldest first."""
        return await self._records.power_cycles(since)

    async def clear(self, device_id: str, principal: str) -> None:
        """Make a device GOOD, whatever happened to it."""
        at = self._now()
        changed = standing.cleared(self.of(device_id), at)
        event = HealthEvent(device_id=device_id, kind=_CLEARED, message=f"cleared by {_line(principal)}")
        was = self._change(device_id, changed, event, at)
        await self._write(device_id, was, changed, event)

    async def settle(self) -> None:
        """Update the devices whose faults have become old enough, and times that lie ahead since the clock was set back."""
        at = self._now()
        for device_id in list(self._standings):
            if device_id not in self._standings:
                continue  # forgotten while the change of another was written
            known = self._standings[device_id] = standing.corrected(self._standings[device_id], at, self.policy)
            settles_at = standing.settles_at(known, self.policy)
            if settles_at is None or settles_at > at:
                continue
            changed = standing.settled(known, at, self.policy)
            if changed.state == known.state and changed.reason == known.reason:
                continue
            event = HealthEvent(device_id=device_id, kind=_RECOVERED, message="its faults are old enough")
            was = self._change(device_id, changed, event, at)
            await self._write(device_id, was, changed, event)

    async def events(self, device_id: str, before: int, count: int, scope: Scope = EVERYTHING) -> tuple[list[HealthEvent], str]:
        """Return a page of a device's events, newest first, and the token of the next page; "" on the last page.

        Args:
            before: number of the event before which the page begins; 0 for the first page.
            count: maximum number of events.
            scope: the caller's scope; attempts of other projects are hidden, and the messages of their faults.
        """
        # Whoever has seen a change also finds its event.
        if writing := [written for written, of in self._writing.items() if of == device_id]:
            await asyncio.wait(writing, timeout=_WRITTEN_S)
        rows = list(await self._records.events(device_id, before, count + 1))
        events = []
        for _, project, event in rows[:count]:
            if event.attempt_id and not scope.allows(project):
                event.attempt_id = event.message = ""
            events.append(event)
        return events, str(rows[count - 1][0]) if len(rows) > count else ""

    async def forget(self, device_id: str) -> None:
        """Remove what is known about a device."""
        self._standings.pop(device_id, None)
        await self._records.delete(device_id)

    def _change(self, device_id: str, changed: Standing, event: HealthEvent, at: datetime) -> Standing:
        """Store a standing in memory, complete its event, and return the former standing."""
        former = self.of(device_id)
        self._standings[device_id] = changed
        event.time.FromDatetime(at)
        event.state, event.fault_score = changed.state, changed.score_at(at, self.policy)
        return former

    async def _write(
        self, device_id: str, former: Standing, changed: Standing, event: HealthEvent, *, project: str = "", series: str = ""
    ) -> int | None:
        """Announce a change that has taken effect, write it, and return the event's number; None if it could not be written."""
        if changed.state != former.state:
            name = HealthState.Name(changed.state).removeprefix("HEALTH_STATE_")
            note = log.info if changed.state == standing.GOOD else log.warning
            note("a device's health changed", device=device_id, health=name, why=changed.reason)
            for listener in self._on_change:
                listener(device_id)
            if changed.state == standing.QUARANTINED:
                for quarantined in self._on_quarantined:
                    quarantined(device_id)
        written = asyncio.get_running_loop().create_future()
        self._writing[written] = device_id
        try:
            return await self._records.save(device_id, changed, event, project=project, series=series)
        except EtfarmError as error:
            log.error("a device's health could not be written", device=device_id, error=error.message)
            return None
        finally:
            del self._writing[written]
            written.set_result(None)


def _line(text: str) -> str:
    """Return a text of an agent or a command for one line, shortened."""
    return shorten(in_a_line(text.strip()), _MAX_MESSAGE)


def weight_of(error: EtfarmError) -> float:
    """Return how much an error counts against the device; 0 for a fault of the user or of the farm."""
    if error.fault is not Fault.DEVICE or error.metadata.get("cause") in FREE_CAUSES:
        return 0.0
    return WEIGHTS.get(error.reason, DEFAULT_WEIGHT)


class HealthRecords:
    """The tables of standings and events."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> dict[str, Standing]:
        """Return the standings by device id. Devices about which nothing is known have no entry."""
        names = [field.name for field in fields(Standing)]
        rows = await self._database.read(lambda connection: connection.execute(select(schema.device_health)).all())
        return {row.device_id: Standing(**{name: getattr(row, name) for name in names}) for row in rows}

    async def save(self, device_id: str, standing: Standing, event: HealthEvent, *, project: str = "", series: str = "") -> int:
        """Write a device's standing with the event that led to it, delete events beyond the limits, and return its number.

        Args:
            project: project of the event's attempt; empty for the farm's own.
            series: the series whose baseline the event's median is part of; empty if it has no VALID median.
        """
        row = {"device_id": device_id, **asdict(standing)}

        def write(connection: Connection) -> int:
            changed = {key: value for key, value in row.items() if key != "device_id"}
            upsert = insert(schema.device_health).values(row)
            connection.execute(upsert.on_conflict_do_update(index_elements=["device_id"], set_=changed))
            values = {
                "device_id": device_id, "at": event.time.ToDatetime(UTC), "kind": event.kind, "project": project,
                "series": series, "p50_ns": event.run.p50_ns if series else None, "body": seal(event),
            }  # fmt: skip
            number = int(connection.execute(_EVENTS.insert().returning(_EVENTS.c.number), values).scalar_one())
            baseline = select(_EVENTS.c.number).where(_EVENTS.c.device_id == device_id, _EVENTS.c.series == series)
            if standing.cleared_at is not None:
                baseline = baseline.where(_EVENTS.c.at > standing.cleared_at)
            kept = _EVENTS.c.number.in_(baseline.order_by(_EVENTS.c.number).limit(BASELINE_RUNS))
            _trim(connection, device_id, _EVENTS.c.series != "", MAX_MEDIANS, kept)
            day_ago = event.time.ToDatetime(UTC) - timedelta(days=1)
            # They limit further ones.
            latest_cycles = and_(_EVENTS.c.kind == _POWER_CYCLED, _EVENTS.c.at > day_ago)
            _trim(connection, device_id, _EVENTS.c.series == "", MAX_EVENTS, latest_cycles)
            return number

        return await self._database.write(write)

    async def replace_event(self, number: int, event: HealthEvent) -> None:
        """Write an event anew, which has changed since, unless its device was forgotten."""
        body = seal(event)
        # Another device's event may have got the number since.
        same = (_EVENTS.c.number == number, _EVENTS.c.device_id == event.device_id, _EVENTS.c.at == event.time.ToDatetime(UTC))
        changed = _EVENTS.update().where(*same).values(body=body)
        await self._database.write(lambda connection: connection.execute(changed))

    async def power_cycles(self, since: datetime) -> Sequence[tuple[str, datetime]]:
        """Return the devices that were power-cycled after a time, and when, oldest first."""
        query = select(_EVENTS.c.device_id, _EVENTS.c.at).where(_EVENTS.c.kind == _POWER_CYCLED, _EVENTS.c.at > since)
        query = query.order_by(_EVENTS.c.number)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        return [(row.device_id, row.at) for row in rows]

    async def paces(self, device_id: str, series: str, since: datetime | None) -> list[Pace]:
        """Return the medians of a series in order, those after a time if one is given."""
        query = select(_EVENTS.c.at, _EVENTS.c.p50_ns).where(_EVENTS.c.device_id == device_id, _EVENTS.c.series == series)
        if since is not None:
            query = query.where(_EVENTS.c.at > since)
        query = query.order_by(_EVENTS.c.number)
        return [Pace(row.at, row.p50_ns) for row in await self._database.read(lambda each: each.execute(query).all())]

    async def events(self, device_id: str, before: int, count: int) -> Sequence[tuple[int, str, HealthEvent]]:
        """Return a device's events, newest first, as their numbers, the projects of their attempts, and themselves.

        Args:
            before: number of the event before which to begin; 0 for the newest one.
            count: maximum number of events.
        """
        query = select(_EVENTS.c.number, _EVENTS.c.project, _EVENTS.c.kind, _EVENTS.c.at, _EVENTS.c.body).where(
            _EVENTS.c.device_id == device_id
        )
        if before:
            query = query.where(_EVENTS.c.number < before)
        query = query.order_by(_EVENTS.c.number.desc()).limit(count)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        events = []
        for row in rows:
            event = unseal_or_none(HealthEvent, row.body, f"a health event of device {device_id}")
            if event is None:  # of which its columns are known
                damaged = "its description is damaged in the database"
                event = HealthEvent(device_id=device_id, kind=row.kind, message=damaged, time=row.at)
            events.append((row.number, row.project, event))
        return events

    async def delete(self, device_id: str) -> None:
        """Delete a device's standing and its events."""

        def write(connection: Connection) -> None:
            connection.execute(delete(schema.device_health).where(schema.device_health.c.device_id == device_id))
            connection.execute(delete(_EVENTS).where(_EVENTS.c.device_id == device_id))

        await self._database.write(write)


def _trim(
    connection: Connection, device_id: str, kind: ColumnElement[bool], most: int, kept: ColumnElement[bool] | None = None
) -> None:
    """Delete a device's oldest events of a kind, except `most` and those that are kept anyway."""
    of_kind = select(_EVENTS.c.number).where(_EVENTS.c.device_id == device_id, kind)
    oldest = of_kind.order_by(_EVENTS.c.number.desc()).offset(most).limit(1).scalar_subquery()
    condition = [_EVENTS.c.device_id == device_id, kind, _EVENTS.c.number <= oldest]
    connection.execute(delete(_EVENTS).where(*condition, *(() if kept is None else (~kept,))))
