"""The registry of the farm's devices: the known devices, the connections that serve them, and their states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Final

from etfarm.server.access.scope import EVERYTHING, Scope
from etfarm.server.devices.admission import MAX_DEVICE_BYTES, DeviceAdmission
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import (
    AgentConnected,
    DeviceConnected,
    DeviceNotFound,
    DeviceNotYours,
    DeviceOffline,
    DeviceServed,
)
from etfarm.server.devices.records import DeviceRecords
from etfarm.server.devices.runners import is_without_runner, known_runner
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.devices.settings import SettingsOfDevices
from etfarm.server.state.cut import fit
from etfarm.server.state.engine import Database
from etfarm.v1 import agent_pb2, device_pb2
from etfarm.v1.device_pb2 import Device, DeviceState
from etfarm.wire.names import boot_id
from etfarm.wire.selectors import Selector
from etfarm.wire.status import to_proto

_SLICE: Final = 100
_LISTED: Final = 20
"""Maximum number of devices that an error lists."""


class Registry:
    """The farm's devices. Listeners are called whenever a device appears, disappears or becomes free.

    Args:
        principal_of: returns the principal that an agent identity is bound to; empty if it is not bound.
    """

    def __init__(
        self,
        database: Database,
        bundles: Bundles,
        runs: Runs,
        now: Callable[[], datetime],
        principal_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._records = DeviceRecords(database)
        self._settings = SettingsOfDevices(self._records)
        self._bundles = bundles
        self._runs = runs
        self._now = now
        self._known: dict[str, Device] = {}
        self._projects: dict[str, frozenset[str]] = {}
        """Projects that a device is restricted to, by device id. A device without an entry is available to all projects."""
        self._telemetry: dict[str, device_pb2.DeviceTelemetry] = {}
        self._sessions: dict[str, AgentSession] = {}
        self._serving: dict[str, AgentSession] = {}
        self._listeners: list[Callable[[], None]] = []
        self._admission = DeviceAdmission(self._known, self._serving, self._projects, principal_of)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Register a function to call at each change."""
        self._listeners.append(listener)

    def changed(self) -> None:
        """Call the listeners."""
        for listener in self._listeners:
            listener()

    async def load(self) -> None:
        """Load the devices from the database; all are offline until their agents connect."""
        await self._settings.load()
        devices, projects = await self._records.load()
        self._projects.update(projects)
        for device in devices:
            fit(device, MAX_DEVICE_BYTES)
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
        in_order, busy = sorted(self._visible(scope).values(), key=_sort_key), self._runs.busy()
        for index in range(start, len(in_order)):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)  # thousands of devices must not block other calls
            device = self._view(in_order[index], scope, busy)
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
        known, busy = self._visible(scope).values(), self._runs.busy()
        return sorted((self._view(device, scope, busy) for device in known), key=_sort_key)

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

    async def restrict(self, key: str, projects: Collection[str]) -> Device:
        """Restrict a device to jobs and sessions of some existing projects; without projects, remove the restriction.

        Current attempts and sessions on the device continue.

        Raises:
            DeviceNotFound: as `get`.
        """
        device_id = self.get(key).id
        await self._records.restrict(device_id, projects)
        if projects:
            self._projects[device_id] = frozenset(projects)
        else:
            self._projects.pop(device_id, None)
        self.changed()
        return self.get(device_id)

    async def label(self, key: str, labels: Mapping[str, str], removed: Collection[str]) -> Device:
        """Set and remove labels of a device, over those that its agent reports.

        Raises:
            DeviceNotFound: as `get`.
            BadLabel: a label is not valid, or there would be too many.
        """
        device_id = self.get(key).id
        await self._settings.label(self._known[device_id], labels, removed)
        self.changed()
        return self.get(device_id)

    async def drain(self, key: str, reason: str, principal: str) -> Device:
        """Place nothing new on a device until `undrain`; what it runs continues.

        Raises:
            DeviceNotFound: as `get`.
        """
        device_id = self.get(key).id
        await self._settings.drain(device_id, reason, principal, self._now())
        self.changed()
        return self.get(device_id)

    async def undrain(self, key: str) -> Device:
        """Let runs be placed on a device again.

        Raises:
            DeviceNotFound: as `get`.
        """
        device_id = self.get(key).id
        await self._settings.undrain(device_id)
        self.changed()
        return self.get(device_id)

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

    def _view(self, device: Device, scope: Scope, busy: Mapping[str, str] | None = None) -> Device:
        view = Device()
        view.CopyFrom(device)
        self._settings.apply(view)
        attempt = self._runs.on_device(device.id) if busy is None else busy.get(device.id)
        view.attempt_id = attempt or ""
        if device.id not in self._serving:
            view.state = DeviceState.DEVICE_STATE_OFFLINE
            # The agent's last report may be outdated.
            view.ClearField("problem")
        else:
            view.state = _state(view)
            if (telemetry := self._telemetry.get(device.id)) is not None:
                view.telemetry.CopyFrom(telemetry)
        if attempt is not None and not scope.allows(self._runs.project_of(attempt)):
            view.attempt_id = ""
        # Restrictions come from the registry, never from the agent's report.
        view.projects[:] = sorted(filter(scope.allows, self._projects.get(device.id, ())))
        if (runner := known_runner(self._bundles, device)) is not None:
            view.backends[:] = runner.backends
            view.operator_count = len(runner.operators)
            view.runner = runner.kind
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

    def is_on_this_machine(self, device_id: str) -> bool:
        """Return whether a connected device's agent runs on the server's own machine."""
        session = self._serving.get(device_id)
        return session is not None and session.boot_id == boot_id() != ""

    def serves(self, session: AgentSession, device_id: str) -> bool:
        """Return whether this connection serves the device."""
        return self._serving.get(device_id) is session

    async def connect(self, session: AgentSession, hello: agent_pb2.Hello) -> None:
        """Register a new connection of an agent.

        If the agent's machine was rebooted since its former connection, wait for a message on the former one: a machine that lost
        power could not close its connection, whereas two copies of one data folder are both alive.

        Raises:
            AgentConnected: another connection of the same agent is alive, or one of another agent with the same device.
            DeviceNotYours: all devices belong to agents with another principal's token.
            TooManyDevices: the new devices would exceed a limit.
        """
        while (former := self._sessions.get(hello.agent_id)) is not None and former.is_alive():
            if "" != former.boot_id != session.boot_id != "" and not await former.is_alive_again():
                session.mark_alive()
                continue
            raise AgentConnected(
                f"Another process serves as agent {hello.agent_id}.",
                "Stop it, or give this one its own data folder (--data).", agent_id=hello.agent_id,
            )  # fmt: skip
        permitted = [device for device in hello.devices if self._admission.may_serve(session, device.id)]
        if hello.devices and not permitted:
            raise DeviceNotYours(hello.devices[0].id)
        accepted = [device for device in permitted if not self._admission.is_served_by_another(device, hello.agent_id)]
        self._admission.require_room(session, accepted)
        if hello.devices and not accepted and not any(device.HasField("problem") for device in hello.devices):
            raise DeviceServed(hello.devices[0].id, self._serving[hello.devices[0].id].agent_id)
        self._sessions[hello.agent_id] = session
        if former is not None:
            former.end()
            await self.disconnect(former)
        # Reconcile before the devices can be assigned: this Hello cannot contain attempts that start from now on.
        self._runs.reconcile({device.id for device in accepted}, {*hello.active_attempts, *hello.unacknowledged_attempts})
        projects = self._admission.projects_of_new(session)
        for device in accepted:
            await self._serve(session, device, projects)
        self.changed()

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

    def end_foreign_session(self, agent_id: str, principal: str) -> None:
        """End the connection of an agent whose token is not this principal's, after its identity was bound to the principal."""
        session = self._sessions.get(agent_id)
        if session is not None and not session.is_admin and session.principal != principal:
            session.end()

    def serves_principal(self, principal: str, device_id: str) -> bool:
        """Return whether an agent with a token of this principal serves the device."""
        session = self._serving.get(device_id)
        return session is not None and session.principal == principal

    async def forget(self, key: str) -> Device:
        """Remove an offline device from the registry; its reports stay.

        Raises:
            DeviceNotFound: as `get`.
            DeviceConnected: its agent is connected.
        """
        device = self.get(key)
        if device.id in self._serving:
            raise DeviceConnected(f"{device.name} ({device.id}) is connected.", "Stop its agent first.", device=device.id)
        del self._known[device.id]
        self._telemetry.pop(device.id, None)
        self._projects.pop(device.id, None)
        await self._records.delete(device.id)
        await self._settings.forget(device.id)
        self.changed()
        return device

    async def update(self, session: AgentSession, device: Device) -> None:
        """Add or update a device of a connected agent.

        Raises:
            DeviceNotYours: the device belongs to an agent with another principal's token.
            AgentConnected: another live agent serves the device and continues to.
            TooManyDevices: a further device would exceed a limit.
        """
        if not self._admission.may_serve(session, device.id):
            raise DeviceNotYours(device.id)
        if self._admission.is_served_by_another(device, session.agent_id):
            if device.HasField("problem"):
                return
            raise DeviceServed(device.id, self._serving[device.id].agent_id)
        self._admission.require_room(session, [device])
        projects = frozenset[str]() if device.id in self._known else self._admission.projects_of_new(session)
        await self._serve(session, device, projects)
        self.changed()

    def gone(self, session: AgentSession, device_id: str, reason: str = "") -> None:
        """Remove a device that left its agent; attempts on it are lost."""
        if self._serving.get(device_id) is session:
            del self._serving[device_id]
            self._runs.reconcile({device_id}, set(), f"left its agent{f' ({reason})' if reason else ''}")
            self.changed()

    def farewell(self, session: AgentSession) -> None:
        """End the connection of an agent that stops on purpose; attempts on its devices are lost."""
        for device_id in [device_id for device_id, serving in self._serving.items() if serving is session]:
            self.gone(session, device_id)

    async def heartbeat(self, session: AgentSession, heartbeat: agent_pb2.Heartbeat) -> None:
        """Store the telemetry, and the current time as the devices' last sign of life."""
        for device_id, telemetry in heartbeat.telemetry.items():
            if self._serving.get(device_id) is session:
                telemetry.time.FromDatetime(self._now())
                self._telemetry[device_id] = telemetry
                self._known[device_id].last_seen_time.FromDatetime(self._now())

    async def disconnect(self, session: AgentSession) -> None:
        """Remove a connection that ended. Its devices go offline, and their attempts wait for the agent to reconnect."""
        if self._sessions.get(session.agent_id) is session:
            del self._sessions[session.agent_id]
        lost = [device_id for device_id, serving in self._serving.items() if serving is session]
        for device_id in lost:
            del self._serving[device_id]
            self._runs.device_went(device_id)
        if lost:
            self.changed()
            await self._remember(lost)

    async def _serve(self, session: AgentSession, device: Device, projects: frozenset[str]) -> None:
        """Assign a device to the connection that serves it.

        Args:
            projects: projects that the device is restricted to if it is new.
        """
        known = Device()
        known.CopyFrom(device)
        known.agent_id = session.agent_id
        known.last_seen_time.FromDatetime(self._now())
        is_confined = projects and device.id not in self._known
        if is_confined:
            self._projects[device.id] = projects
        self._known[device.id] = known
        self._serving[device.id] = session
        await self._remember([device.id], projects if is_confined else frozenset())

    async def _remember(self, device_ids: Sequence[str], projects: frozenset[str] = frozenset()) -> None:
        """Write devices to the database, and add restrictions to projects."""
        known = [device for device_id in device_ids if (device := self._known.get(device_id)) is not None]
        await self._records.save(known, projects)


def _sort_key(device: Device) -> tuple[str, str]:
    return device.name, device.id


def _state(device: Device) -> DeviceState.ValueType:
    """Return the state of a connected device. It is BUSY until its attempt ends, whatever the agent reports in the meantime."""
    if device.HasField("drain"):
        return DeviceState.DEVICE_STATE_DRAINING
    if device.attempt_id:
        return DeviceState.DEVICE_STATE_BUSY
    return DeviceState.DEVICE_STATE_UNUSABLE if device.HasField("problem") else DeviceState.DEVICE_STATE_IDLE
