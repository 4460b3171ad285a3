"""Database records of the devices' standings, and of the events that led to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, delete, select

from etfarm.server.devices.health.baseline import BASELINE_RUNS, Pace
from etfarm.server.devices.health.standing import Standing
from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.device_pb2 import HealthEvent, HealthEventKind

MAX_EVENTS: Final = 600
"""Maximum number of events kept for each device, besides the medians of health runs."""
MAX_MEDIANS: Final = 400
"""Maximum number of health runs with a median kept for each device, besides those of the baseline: a year of one a day."""

_EVENTS: Final = schema.health_events
_POWER_CYCLED: Final = HealthEventKind.HEALTH_EVENT_KIND_POWER_CYCLED


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
                event = HealthEvent(device_id=device_id, kind=row.kind, message="its description is damaged in the database")
                event.time.FromDatetime(row.at)
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
