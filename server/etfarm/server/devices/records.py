"""Database records of the known devices, of their restrictions to projects, and of what admins have set for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC

from sqlalchemy import Connection, delete, select

from etfarm.server.state import schema
from etfarm.server.state.bodies import seal, unseal_or_none
from etfarm.server.state.engine import Database
from etfarm.server.state.sql import insert
from etfarm.v1.device_pb2 import Device, DeviceSettings


class DeviceRecords:
    """The tables of devices, of their projects and of their settings."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self) -> tuple[Sequence[Device], Mapping[str, frozenset[str]]]:
        """Return the devices, and by device id the projects that it is restricted to. Unrestricted devices have no entry.

        Of a device that is damaged in the database, only the id is known until its agent describes it again.
        """
        devices, projects = schema.devices, schema.device_projects
        rows = await self._database.read(lambda connection: connection.execute(select(devices)).all())
        known: list[Device] = []
        for row in rows:
            device = unseal_or_none(Device, row.body, f"the device {row.id}") or Device(name=row.id)
            device.id = row.id
            device.last_seen_time.FromDatetime(row.last_seen_at)
            known.append(device)
        restricted: dict[str, frozenset[str]] = {}
        for row in await self._database.read(lambda connection: connection.execute(select(projects)).all()):
            restricted[row.device_id] = restricted.get(row.device_id, frozenset()) | {row.project}
        return known, restricted

    async def save(self, devices: Sequence[Device], projects: Collection[str] = ()) -> None:
        """Write devices, and add `projects` to their restrictions."""
        rows = [
            {"id": device.id, "body": seal(device), "last_seen_at": device.last_seen_time.ToDatetime(UTC)} for device in devices
        ]
        restrictions = [{"device_id": row["id"], "project": project} for row in rows for project in sorted(projects)]

        def write(connection: Connection) -> None:
            for row in rows:
                changed = {key: row[key] for key in ("body", "last_seen_at")}
                connection.execute(insert(schema.devices).values(row).on_conflict_do_update(index_elements=["id"], set_=changed))
            if restrictions:
                connection.execute(insert(schema.device_projects).on_conflict_do_nothing(), restrictions)

        await self._database.write(write)

    async def restrict(self, device_id: str, projects: Collection[str]) -> None:
        """Restrict a device to exactly these projects; an empty collection removes all restrictions."""
        table = schema.device_projects
        rows = [{"device_id": device_id, "project": project} for project in sorted(set(projects))]

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(table.c.device_id == device_id))
            if rows:
                connection.execute(table.insert(), rows)

        await self._database.write(write, durable=True)

    async def load_settings(self) -> dict[str, DeviceSettings]:
        """Return what admins have set, by device id. Devices without settings have no entry."""
        rows = await self._database.read(lambda connection: connection.execute(select(schema.device_settings)).all())
        settings = {
            row.device_id: unseal_or_none(DeviceSettings, row.body, f"the settings of device {row.device_id}") for row in rows
        }
        return {device_id: each for device_id, each in settings.items() if each is not None}

    async def save_settings(self, device_id: str, settings: DeviceSettings) -> None:
        """Write a device's settings; empty ones remove the record."""
        table, body = schema.device_settings, seal(settings)

        def write(connection: Connection) -> None:
            connection.execute(delete(table).where(table.c.device_id == device_id))
            if settings.ByteSize():
                connection.execute(table.insert(), {"device_id": device_id, "body": body})

        await self._database.write(write, durable=True)

    async def delete(self, device_id: str) -> None:
        """Delete a device, its restrictions and its settings."""

        def write(connection: Connection) -> None:
            connection.execute(delete(schema.device_settings).where(schema.device_settings.c.device_id == device_id))
            connection.execute(delete(schema.devices).where(schema.devices.c.id == device_id))
            connection.execute(delete(schema.device_projects).where(schema.device_projects.c.device_id == device_id))

        await self._database.write(write, durable=True)
