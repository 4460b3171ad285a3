"""What admins set for devices, over what their agents report: labels, and drains with their reasons."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Final

from etfarm.server.devices.records import DeviceRecords
from etfarm.v1.device_pb2 import Device, DeviceDrain, DeviceSettings
from etfarm.wire.errors import error_for

MAX_LABELS: Final = 64
"""Maximum number of a device's labels, and of those of its agent that are removed."""

_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,100}")


class SettingsOfDevices:
    """The settings of all devices, in memory and in the database."""

    def __init__(self, records: DeviceRecords) -> None:
        self._records = records
        self._known: dict[str, DeviceSettings] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Load the settings from the database."""
        self._known.update(await self._records.load_settings())

    def apply(self, device: Device) -> None:
        """Set a device's labels and drain, which never come from its agent."""
        device.ClearField("drain")
        if (settings := self._known.get(device.id)) is None:
            return
        for key in settings.removed_labels:
            device.labels.pop(key, None)
        device.labels.update(settings.labels)
        if settings.HasField("drain"):
            device.drain.CopyFrom(settings.drain)

    def labels_of(self, device_id: str) -> Mapping[str, str]:
        """Return the labels that admins have set for a device."""
        return self._known.get(device_id, DeviceSettings()).labels

    async def label(self, device: Device, labels: Mapping[str, str], removed: Collection[str]) -> None:
        """Set and remove labels of a device, given as its agent reports it.

        Raises:
            BAD_LABEL: a label is not valid, one key is set and removed, or the device would have more than MAX_LABELS.
        """
        _check(labels, removed)
        async with self._changing:
            settings = self._copy(device.id)
            settings.labels.update(labels)
            for key in removed:
                settings.labels.pop(key, None)
            hidden = ({*settings.removed_labels} | ({*removed} & {*device.labels})) - labels.keys()
            settings.removed_labels[:] = sorted(hidden)
            total = {*device.labels, *settings.labels} - hidden
            if max(len(total), len(hidden)) > MAX_LABELS:
                raise error_for(
                    "BAD_LABEL",
                    f"{device.name} would have more than {MAX_LABELS} labels.",
                    "Remove some with --remove.",
                    limit=MAX_LABELS,
                )
            await self._store(device.id, settings)

    async def drain(self, device_id: str, reason: str, principal: str, now: datetime) -> None:
        """Drain a device; if it is drained already, replace the reason."""
        async with self._changing:
            settings = self._copy(device_id)
            drain = DeviceDrain(reason=reason, principal=principal)
            drain.start_time.FromDatetime(now)
            settings.drain.CopyFrom(drain)
            await self._store(device_id, settings)

    async def undrain(self, device_id: str) -> None:
        """Let runs be placed on a device again."""
        async with self._changing:
            settings = self._copy(device_id)
            settings.ClearField("drain")
            await self._store(device_id, settings)

    async def forget(self, device_id: str) -> None:
        """Remove a device's settings, after changes of them that have begun."""
        async with self._changing:
            await self._store(device_id, DeviceSettings())

    def _copy(self, device_id: str) -> DeviceSettings:
        settings = DeviceSettings()
        settings.CopyFrom(self._known.get(device_id, settings))
        return settings

    async def _store(self, device_id: str, settings: DeviceSettings) -> None:
        await self._records.save_settings(device_id, settings)
        if settings.ByteSize():
            self._known[device_id] = settings
        else:
            self._known.pop(device_id, None)


def _check(labels: Mapping[str, str], removed: Collection[str]) -> None:
    for key in (*labels, *removed):
        if not _KEY.fullmatch(key):
            raise error_for(
                "BAD_LABEL",
                f"A label's key must consist of 1 to 100 letters, digits, '.', '_', '/' and '-', got {key!r}.",
                label=key,
            )
    for key, value in labels.items():
        if not value.isprintable():
            raise error_for("BAD_LABEL", f"The value of label {key!r} must be printable, got {value!r}.", label=key)
    if both := sorted({*labels} & {*removed}):
        raise error_for("BAD_LABEL", f"Label {both[0]!r} is both set and removed.", "Give each label once.", label=both[0])
