"""The registry of the farm's devices: changes of the known devices, and of the connections that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

import structlog

from etfarm.server.devices.admission import DeviceAdmission, clear_server_fields
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.directory import DeviceDirectory
from etfarm.server.devices.errors import (
    AgentConnected,
    DeviceNotYours,
    DeviceServed,
    agent_outdated,
)
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.state.engine import Database, DatabaseFull, DatabaseUnavailable
from etfarm.v1 import agent_pb2, device_pb2
from etfarm.v1.device_pb2 import Device
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.status import to_proto

log = structlog.get_logger()


class Registry(DeviceDirectory):
    """The farm's devices, and what changes them. Listeners are called whenever a device appears, disappears or becomes free.

    Args:
        principal_of: returns the principal that an agent identity is bound to; empty if it is not bound.
        reservation_of: returns the current reservation of a device.
        fill_health: fills `Device.health`.
    """

    def __init__(
        self,
        database: Database,
        bundles: Bundles,
        runs: Runs,
        now: Callable[[], datetime],
        principal_of: Callable[[str], str] = lambda _: "",
        reservation_of: Callable[[str], device_pb2.Reservation | None] = lambda _: None,
        fill_health: Callable[[Device], None] = lambda _: None,
    ) -> None:
        super().__init__(database, bundles, runs, reservation_of, fill_health)
        bundles.on_change = self.changed
        self._now = now
        self._listeners: list[Callable[[], None]] = []
        self._followers: list[Callable[[Collection[str]], None]] = []
        self._telemetry_listeners: list[Callable[[Mapping[str, device_pb2.DeviceTelemetry]], None]] = []
        self._admission = DeviceAdmission(self._known, self._serving, self._projects, principal_of)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Register a function to call at each change."""
        self._listeners.append(listener)

    def follow(self, follower: Callable[[Collection[str]], None]) -> None:
        """Register a function to call at each change with the ids of the changed devices, without ids if all may have changed."""
        self._followers.append(follower)

    def on_telemetry(self, listener: Callable[[Mapping[str, device_pb2.DeviceTelemetry]], None]) -> None:
        """Register a function to call with the readings of each heartbeat, by device id."""
        self._telemetry_listeners.append(listener)

    def changed(self, *device_ids: str) -> None:
        """Call the listeners.

        Args:
            device_ids: the devices that changed, appeared or were removed; all when empty.
        """
        for listener in self._listeners:
            listener()
        for follower in self._followers:
            follower(device_ids)

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
        self.changed(device_id)
        return self.get(device_id)

    async def label(self, key: str, labels: Mapping[str, str], removed: Collection[str]) -> Device:
        """Set and remove labels of a device, over those that its agent reports.

        Raises:
            DeviceNotFound: as `get`.
            BAD_LABEL: a label is not valid, or there would be too many.
        """
        device_id = self.get(key).id
        await self._settings.label(self._known[device_id], labels, removed)
        self.changed(device_id)
        return self.get(device_id)

    async def drain(self, key: str, reason: str, principal: str) -> Device:
        """Place nothing new on a device until `undrain`; what it runs continues.

        Raises:
            DeviceNotFound: as `get`.
        """
        device_id = self.get(key).id
        await self._settings.drain(device_id, reason, principal, self._now())
        self.changed(device_id)
        return self.get(device_id)

    async def undrain(self, key: str) -> Device:
        """Let runs be placed on a device again.

        Raises:
            DeviceNotFound: as `get`.
        """
        device_id = self.get(key).id
        await self._settings.undrain(device_id)
        self.changed(device_id)
        return self.get(device_id)

    async def connect(
        self, session: AgentSession, hello: agent_pb2.Hello, require_admitted: Callable[[], None] = lambda: None
    ) -> None:
        """Register a new connection of an agent.

        Args:
            require_admitted: raises an error if the agent is not admitted any more, which may have waited to be accepted.

        Raises:
            AgentConnected, DeviceServed, DeviceNotYours, DeviceTooLarge, TooManyDevices: as `accept`.
        """
        accepted = await self.accept(session, hello.devices)
        require_admitted()
        former = self._sessions.get(hello.agent_id)
        self._sessions[hello.agent_id] = session
        if former is not None:
            former.end()
            await self.disconnect(former)
        # Reconcile before the devices can be assigned: this Hello cannot contain attempts that start from now on.
        self._runs.reconcile({device.id for device in accepted}, {*hello.active_attempts, *hello.unacknowledged_attempts})
        projects = self._admission.projects_of_new(session)
        for device in accepted:
            await self._serve(session, device, projects)
        if accepted:
            self.changed(*(device.id for device in accepted))

    async def accept(self, session: AgentSession, devices: Sequence[Device]) -> list[Device]:
        """Return those of an agent's devices that it may serve; its connection need not be registered.

        An agent or a device that has moved is accepted, whereas two copies are both alive. A machine that lost power could not
        close its connection: wait for a message on one from another boot.

        Raises:
            AgentConnected: another connection of the same agent is alive.
            DeviceServed: a live agent serves each of the devices.
            DeviceNotYours: all devices belong to agents with another principal's token.
            DeviceTooLarge, TooManyDevices: new devices would exceed a limit.
        """
        rivals = {former} if (former := self._sessions.get(session.agent_id)) is not None and former.is_alive() else set()
        others = {self._admission.rival(device, session.agent_id) for device in devices}
        rivals |= {other for other in others if other is not None and None not in others}
        if waited := [rival for rival in rivals if "" != rival.boot_id != session.boot_id != ""]:
            await asyncio.gather(*(rival.is_alive_again() for rival in waited))
            session.mark_alive()
        former = self._sessions.get(session.agent_id)
        if former is not None and former.is_alive():
            raise _connected(former, session)
        permitted = [device for device in devices if self._admission.may_serve(session, device.id)]
        accepted = [device for device in permitted if self._admission.rival(device, session.agent_id) is None]
        if devices and not accepted and not any(device.HasField("problem") for device in devices):
            for device in devices:
                if (other := self._admission.rival(device, session.agent_id)) is not None:
                    raise DeviceServed(device.id, other.agent_id, other.host)
        if devices and not permitted:
            raise self._not_yours(session, devices[0].id)
        self._admission.require_room(session, accepted)
        return accepted

    def _not_yours(self, session: AgentSession, device_id: str) -> DeviceNotYours:
        return DeviceNotYours(device_id, self._known[device_id].agent_id, session.principal)

    def end_foreign_session(self, agent_id: str, principal: str) -> None:
        """End the connection of an agent whose token is not this principal's, after its identity was bound to the principal."""
        session = self._sessions.get(agent_id)
        if session is not None and not session.is_admin and session.principal != principal:
            session.end()

    async def end_agent(self, agent_id: str) -> None:
        """End the connection of an agent, whose devices go offline."""
        if (session := self._sessions.get(agent_id)) is not None:
            session.end()
            await self.disconnect(session)

    def end_runs(self, device_id: str, why: str) -> list[str]:
        """End what a device runs, which its agent is asked to cancel; return the attempts."""
        attempts = self._runs.on_device(device_id)
        if (session := self._serving.get(device_id)) is not None:
            for attempt_id in attempts:
                cancel = agent_pb2.CancelRun(attempt_id=attempt_id, reason=why)
                session.send(agent_pb2.ServerMessage(cancel_run=cancel))
        self._runs.reconcile({device_id}, set(), why, cause="gone")
        return attempts

    def detach(self, device_id: str) -> None:
        """End a device's service by its agent, whose other devices stay, until the agent announces it again."""
        if self._serving.pop(device_id, None) is not None:
            self.changed(device_id)

    async def forget(self, key: str) -> Device:
        """Remove an offline device from the registry; its reports stay.

        Raises:
            DeviceNotFound: as `get`.
            DEVICE_CONNECTED: its agent is connected.
        """
        device = self.get(key)
        if device.id in self._serving:
            raise error_for(
                "DEVICE_CONNECTED", f"{device.name} ({device.id}) is connected.", "Stop its agent first.", device=device.id
            )
        del self._known[device.id]
        self._telemetry.pop(device.id, None)
        self._absent.pop(device.id, None)
        self._projects.pop(device.id, None)
        await self._records.delete(device.id)
        await self._settings.forget(device.id)
        self.changed(device.id)
        return device

    async def update(self, session: AgentSession, device: Device) -> None:
        """Add or update a device of a connected agent.

        Raises:
            DeviceNotYours: the device belongs to an agent with another principal's token.
            AgentConnected: another live agent serves the device and continues to.
            TooManyDevices: a further device would exceed a limit.
        """
        if not self._admission.may_serve(session, device.id):
            raise self._not_yours(session, device.id)
        if (other := self._admission.rival(device, session.agent_id)) is not None:
            if device.HasField("problem"):
                return
            raise DeviceServed(device.id, other.agent_id, other.host)
        self._admission.require_room(session, [device])
        await self._serve(session, device, self._admission.projects_of_new(session))
        self.changed(device.id)

    def gone(self, session: AgentSession, device_id: str, reason: str = "") -> None:
        """Remove a device that left its agent; attempts on it are lost."""
        if self._serving.get(device_id) is session:
            del self._serving[device_id]
            if reason:
                self._absent[device_id] = self._now()
            why = f"left its agent{f' ({reason})' if reason else ''}"
            self._runs.reconcile({device_id}, set(), why, cause="gone" if reason else "stopped")
            self.changed(device_id)

    def farewell(self, session: AgentSession) -> None:
        """End the connection of an agent that stops on purpose; attempts on its devices are lost."""
        for device_id in [device_id for device_id, serving in self._serving.items() if serving is session]:
            self.gone(session, device_id)

    async def heartbeat(self, session: AgentSession, heartbeat: agent_pb2.Heartbeat) -> None:
        """Store the telemetry, and the current time as the devices' last sign of life."""
        accepted: dict[str, device_pb2.DeviceTelemetry] = {}
        at = self._now()
        for device_id, telemetry in heartbeat.telemetry.items():
            if self._serving.get(device_id) is session:
                # Nothing else limits the size of unknown fields. A copy, since a part of a message keeps all of it in memory.
                telemetry.DiscardUnknownFields()
                reading = device_pb2.DeviceTelemetry()
                reading.CopyFrom(telemetry)
                reading.time.FromDatetime(at)
                self._telemetry[device_id] = accepted[device_id] = reading
                self._known[device_id].last_seen_time.CopyFrom(reading.time)
        for listener in self._telemetry_listeners if accepted else ():
            listener(accepted)

    async def disconnect(self, session: AgentSession) -> None:
        """Remove a connection that ended. Its devices go offline, and their attempts wait for the agent to reconnect."""
        if self._sessions.get(session.agent_id) is session:
            del self._sessions[session.agent_id]
        lost = [device_id for device_id, serving in self._serving.items() if serving is session]
        for device_id in lost:
            del self._serving[device_id]
            self._absent[device_id] = self._now()
            self._runs.device_went(device_id)
        if lost:
            self.changed(*lost)
            try:
                await self._remember(lost)
            except EtfarmError as error:
                if error.reason != "FENCED":  # the server that leads now has its own records of them
                    raise

    async def _serve(self, session: AgentSession, device: Device, projects: frozenset[str]) -> None:
        """Assign a device to the connection that serves it.

        Args:
            projects: projects that the device is restricted to if it is new.
        """
        known = Device()
        known.CopyFrom(device)
        clear_server_fields(known)
        known.agent_id = session.agent_id
        known.agent_version = session.version
        if session.is_outdated:
            known.problem.CopyFrom(to_proto(agent_outdated(session.version)))
            self._runs.reconcile({device.id}, set())
        known.last_seen_time.FromDatetime(self._now())
        former = self._known.get(device.id)
        # One without an agent was damaged in the database, which has kept its restrictions.
        is_new = former is None or not (former.agent_id or device.id in self._projects)
        is_confined = projects and is_new
        if is_confined:
            self._projects[device.id] = projects
        self._known[device.id] = known
        self._serving[device.id] = session
        self._absent.pop(device.id, None)
        await self._remember([device.id], projects if is_confined else frozenset())

    async def _remember(self, device_ids: Sequence[str], projects: frozenset[str] = frozenset()) -> None:
        """Write devices to the database, and add restrictions to projects, which must not be lost.

        Without a writable database they stay as they are known in memory: their agents connect, and what runs there goes on.
        """
        known = [device for device_id in device_ids if (device := self._known.get(device_id)) is not None]
        try:
            await self._records.save(known, projects)
        except (DatabaseFull, DatabaseUnavailable) as error:
            if projects:
                raise
            log.warning("descriptions of devices could not be written", devices=len(known), error=error.message)


def _connected(former: AgentSession, session: AgentSession) -> AgentConnected:
    """Return the error of an agent that is connected already, from this boot of this machine or from another one."""
    if "" != former.boot_id != session.boot_id != "":
        return AgentConnected(
            f"Agent {session.agent_id} is connected from another machine{f' ({former.host})' if former.host else ''}: this data "
            "folder is a copy.",
            "To serve both, delete `agent_id`, `device_id` and `token` in this data folder, and start the agent with a one-time "
            "token of its own. If the folder has moved here, stop the other agent.", agent_id=session.agent_id,
        )  # fmt: skip
    return AgentConnected(
        f"Another process serves as agent {session.agent_id}, whose data folder is this one or a copy of it.",
        "Stop it. To serve as two agents, delete `agent_id`, `device_id` and `token` in the copy (--data), and start its agent "
        "with a one-time token of its own where the farm has tokens.", agent_id=session.agent_id,
    )  # fmt: skip
