"""The directory of the farm's devices: what is known of them, and which connections serve them.

Admins set labels, and drains with their reasons, over what agents report.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Final

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.admission import MAX_DEVICE_BYTES, clear_server_fields
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import (
    DeviceNotFound,
    DeviceOffline,
)
from etfarm.server.devices.records import DeviceRecords
from etfarm.server.devices.reservation_choice import brief
from etfarm.server.devices.runners import is_without_runner, known_runner
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.state.cut import fit
from etfarm.server.state.engine import Database
from etfarm.v1 import device_pb2
from etfarm.v1.device_pb2 import Device, DeviceDrain, DeviceSettings, DeviceState
from etfarm.wire.errors import error_for
from etfarm.wire.names import boot_id
from etfarm.wire.selectors import Selector
from etfarm.wire.status import to_proto

_SLICE: Final = 100
_LISTED: Final = 20
"""Maximum number of devices that an error lists."""
MAX_LABELS: Final = 64
"""Maximum number of a device's labels, and of those of its agent that are removed."""

_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,100}")


class DeviceDirectory:
    """The known devices with their current states, for reading. `Registry` changes them.

    Args:
        reservation_of: returns the current reservation of a device.
        fill_health: fills `Device.health`.
    """

    def __init__(
        self,
        database: Database,
        bundles: Bundles,
        runs: Runs,
        reservation_of: Callable[[str], device_pb2.Reservation | None] = lambda _: None,
        fill_health: Callable[[Device], None] = lambda _: None,
    ) -> None:
        self._reservation_of = reservation_of
        self._fill_health = fill_health
        self._absent: dict[str, datetime] = {}
        """When devices disappeared without a farewell, by device id."""
        self._records = DeviceRecords(database)
        self._settings = SettingsOfDevices(self._records)
        self._bundles = bundles
        self._runs = runs
        self._known: dict[str, Device] = {}
        self._projects: dict[str, frozenset[str]] = {}
        """Projects that a device is restricted to, by device id. A device without an entry is available to all projects."""
        self._telemetry: dict[str, device_pb2.DeviceTelemetry] = {}
        self._sessions: dict[str, AgentSession] = {}
        self._serving: dict[str, AgentSession] = {}

    def known(self, device_ids: Collection[str]) -> dict[str, Device]:
        """Return the devices with these ids, as the server itself sees them. Unknown ids are left out."""
        return {each: self._view(device, EVERYTHING) for each in device_ids if (device := self._known.get(each)) is not None}

    async def load(self) -> None:
        """Load the devices from the database; all are offline until their agents connect."""
        await self._settings.load()
        devices, projects = await self._records.load()
        self._projects.update(projects)
        for device in devices:
            fit(device, MAX_DEVICE_BYTES)
            # A server that did not know a field has stored what the agent sent.
            clear_server_fields(device)
            self._known[device.id] = device

    def count(self, scope: Scope = EVERYTHING) -> tuple[int, int]:
        """Return the number of devices that a scope sees, and the number of those with a connected agent."""
        known = self._visible(scope)
        return len(known), sum(device_id in known for device_id in self._serving)

    async def page(
        self, selector: Selector, start: int, size: int, most_bytes: int, scope: Scope = EVERYTHING
    ) -> tuple[Sequence[Device], int | None]:
        """Return a page of the known devices that match a selector, sorted by name, and the start of the next page.

        Args:
            start: number of known devices before the page.
            size: maximum number of devices.
            most_bytes: maximum total size; a single device may exceed it.
            scope: as in `devices`.
        """
        listed: list[Device] = []
        in_order = sorted(self._visible(scope).values(), key=_sort_key)
        for index in range(start, len(in_order)):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # thousands of devices must not block other calls
            device = self._view(in_order[index], scope)
            if not selector.matches(device):
                continue
            most_bytes -= device.ByteSize()
            if listed and (len(listed) >= size or most_bytes < 0):
                return listed, index
            listed.append(device)
        return listed, None

    def devices(self, scope: Scope = EVERYTHING) -> Sequence[Device]:
        """Return the known devices with their current states, sorted by name.

        Args:
            scope: the caller's scope. Devices that are restricted to other projects, and the attempts of other projects, are
                hidden.
        """
        return sorted((self._view(device, scope) for device in self._visible(scope).values()), key=_sort_key)

    def get(self, key: str, scope: Scope = EVERYTHING) -> Device:
        """Return the device with an id, a unique prefix of an id, or a name.

        Args:
            scope: as in `devices`.

        Raises:
            DeviceNotFound: no device matches, or several match.
        """
        known = self._visible(scope)
        if key in known:
            return self._view(known[key], scope)
        matching = [device for device in known.values() if device.name == key]
        matching = matching or [device for device in known.values() if key and device.id.startswith(key)]
        if len(matching) != 1:
            named = sorted(f"{device.name} ({device.id})" for device in matching or known.values())
            names = ", ".join(named[:_LISTED]) + (f" and {len(named) - _LISTED} more" if len(named) > _LISTED else "") or "none"
            what = "Several devices are called" if matching else "There is no device"
            raise DeviceNotFound(f"{what} {key!r}.", f"Known: {names}.", device=key)
        return self._view(matching[0], scope)

    def ids(self) -> Sequence[str]:
        """Return the ids of all known devices, sorted by the devices' names."""
        return [device.id for device in sorted(self._known.values(), key=_sort_key)]

    def find(self, device_id: str, scope: Scope) -> Device | None:
        """Return the device with an id; None if the scope has none."""
        device, projects = self._known.get(device_id), self._projects.get(device_id)
        if device is None or (projects and not any(map(scope.allows, projects))):
            return None
        return self._view(device, scope)

    def describe(self, device: Device) -> Device:
        """Return a device as its users see it: an idle one without a runner is unusable, with the reason."""
        if device.state == DeviceState.DEVICE_STATE_IDLE and is_without_runner(self._bundles, device):
            device.state = DeviceState.DEVICE_STATE_UNUSABLE
            device.problem.CopyFrom(to_proto(self._bundles.missing(device.arch)))
        return device

    def _visible(self, scope: Scope) -> dict[str, Device]:
        """Return the known devices, by id, that at least one project of the scope may use."""
        if scope.projects is None:
            return self._known
        return {
            device_id: device
            for device_id, device in self._known.items()
            if not (projects := self._projects.get(device_id)) or any(map(scope.allows, projects))
        }

    def _view(self, device: Device, scope: Scope) -> Device:
        view = Device()
        view.CopyFrom(device)
        self._settings.apply(view)
        self._fill_health(view)
        attempts = self._runs.on_device(device.id)
        view.attempt_id = attempts[0] if attempts else ""
        if device.id not in self._serving:
            view.state = DeviceState.DEVICE_STATE_OFFLINE
            # The agent's last report may be outdated.
            view.ClearField("problem")
        else:
            view.state = _state(view)
            if (telemetry := self._telemetry.get(device.id)) is not None:
                view.telemetry.CopyFrom(telemetry)
        view.attempt_ids[:] = [each for each in attempts if scope.allows(self._runs.project_of(each))]
        view.attempt_id = view.attempt_ids[0] if view.attempt_ids else ""
        # Restrictions come from the registry, never from the agent's report.
        view.projects[:] = sorted(filter(scope.allows, self._projects.get(device.id, ())))
        if (reservation := self._reservation_of(device.id)) is not None:
            view.reservation.CopyFrom(brief(reservation, device.id, scope))
        if (runner := known_runner(self._bundles, device)) is not None:
            view.backends[:] = runner.backends
            view.operator_count = len(runner.operators)
            view.runner = runner.kind
        else:
            view.is_runner_coming = self._bundles.is_coming(device.arch)
        return view

    def session_of(self, device_id: str) -> AgentSession:
        """Return the connection that serves a device.

        Raises:
            DeviceOffline: no connection serves it.
        """
        session = self._serving.get(device_id)
        if session is None:
            raise DeviceOffline(f"Device {device_id} is offline.", device=device_id)
        return session

    def is_connected(self, device_id: str) -> bool:
        """Return whether a connection serves the device."""
        return device_id in self._serving

    def connected(self) -> Sequence[str]:
        """Return the ids of the devices that connections serve."""
        return list(self._serving)

    def absent_since(self) -> Mapping[str, datetime]:
        """Return when devices disappeared that are still away, by id, without those whose agents were stopped on purpose."""
        return self._absent

    def labels_set_by_admins(self, device_id: str) -> Mapping[str, str]:
        """Return the labels that admins have set for a device, without those that its agent reports."""
        return self._settings.labels_of(device_id)

    def session_of_agent(self, agent_id: str) -> AgentSession | None:
        """Return the live connection of an agent; None if it is not connected."""
        session = self._sessions.get(agent_id)
        return session if session is not None and session.is_alive() else None

    def served_by(self, session: AgentSession) -> list[str]:
        """Return the ids of the devices that a connection serves, sorted."""
        return sorted(device_id for device_id, serving in self._serving.items() if serving is session)

    def is_on_this_machine(self, device_id: str) -> bool:
        """Return whether a connected device's agent runs on the server's own machine."""
        session = self._serving.get(device_id)
        return session is not None and session.boot_id == boot_id() != ""

    def serves(self, session: AgentSession, device_id: str) -> bool:
        """Return whether this connection serves the device."""
        return self._serving.get(device_id) is session

    def version_of_agent(self, agent_id: str) -> str:
        """Return the version of etfarm that an agent has, or had when it was connected last; empty if it is unknown."""
        session = self._sessions.get(agent_id)
        versions = (device.agent_version for device in self._known.values() if device.agent_id == agent_id)
        return session.version if session is not None else next((version for version in versions if version), "")

    def agents(self) -> dict[str, list[str]]:
        """Return the ids of the known devices, by the id of the agent that announced them last."""
        devices: dict[str, list[str]] = {}
        for device in self._known.values():
            devices.setdefault(device.agent_id, []).append(device.id)
        return devices

    def is_agent_known(self, agent_id: str) -> bool:
        """Return whether a known device belongs to the agent identity."""
        return any(device.agent_id == agent_id for device in self._known.values())

    def is_agent_connected(self, agent_id: str) -> bool:
        """Return whether an agent with this identity is connected and alive."""
        session = self._sessions.get(agent_id)
        return session is not None and session.is_alive()

    def agent_of(self, device_id: str) -> str:
        """Return the id of the agent that announced a device last; empty if the device is unknown."""
        device = self._known.get(device_id)
        return "" if device is None else device.agent_id

    def serves_principal(self, principal: str, device_id: str) -> bool:
        """Return whether an agent with a token of this principal serves the device."""
        session = self._serving.get(device_id)
        return session is not None and session.principal == principal


def _sort_key(device: Device) -> tuple[str, str]:
    return device.name, device.id


def _state(device: Device) -> DeviceState.ValueType:
    """Return the state of a connected device. It is BUSY until its attempt ends, whatever the agent reports in the meantime."""
    if device.HasField("drain"):
        return DeviceState.DEVICE_STATE_DRAINING
    if device.attempt_id:
        return DeviceState.DEVICE_STATE_BUSY
    return DeviceState.DEVICE_STATE_UNUSABLE if device.HasField("problem") else DeviceState.DEVICE_STATE_IDLE


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
