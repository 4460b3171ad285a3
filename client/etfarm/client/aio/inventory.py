"""The part of `AsyncFarm` that manages what a farm has: devices, agents, projects, recipes and bundles."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from etfarm.client.admin.projects import AsyncProjects
from etfarm.client.admin.stored_artifacts import AsyncArtifacts
from etfarm.client.admin.webhooks import AsyncWebhooks
from etfarm.client.aio.connected import AsyncConnected
from etfarm.client.errors import from_rpc_error
from etfarm.client.models import (
    Agent,
    Bundle,
    Device,
    DeviceChange,
    HealthEvent,
    Project,
    RecipeInfo,
    RemovedAgent,
    ReservationInfo,
    RetiredDevice,
    ServerInfo,
    ServerStatus,
    Telemetry,
    UpgradeProgress,
)
from etfarm.client.transport import transfers
from etfarm.client.transport.decode import decoded
from etfarm.client.transport.timestamps import to_timestamp
from etfarm.v1 import agent_pb2, compile_pb2, device_pb2, farm_pb2
from etfarm.wire import chunks, selectors
from etfarm.wire.errors import EtfarmError, Kind, UserError

if TYPE_CHECKING:
    from etfarm.client.fleet.reservation import AsyncReservation

TELEMETRY_PAGE_SIZE: Final = 5_000
"""Requested number of readings on a page: the most that a server returns."""


class AsyncInventory(AsyncConnected):
    """The devices, agents, projects, recipes and bundles of a farm."""

    async def devices(self, selector: str = "") -> list[Device]:
        """Return the known devices that match, including offline devices.

        Raises:
            UserError: `selector` is not a valid selector.
        """
        selectors.parse(selector)
        request = device_pb2.ListDevicesRequest(selector=selector)
        rows = self._rows(self._open.devices.List, request, "devices")
        return [decoded(Device, device) async for device in rows]

    async def device(self, device_id: str) -> Device:
        """Return a device by its id, a unique prefix of its id, or its name.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND.
        """
        request = device_pb2.GetDeviceRequest(device_id=device_id)
        return decoded(Device, await self._open.devices.Get(request))

    async def forget_device(self, device_id: str) -> None:
        """Remove an offline device from the farm; its reports stay. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, DEVICE_CONNECTED, PERMISSION_DENIED.
        """
        request = device_pb2.ForgetDeviceRequest(device_id=device_id)
        await self._open.devices.Forget(request)

    async def retire_device(self, device_id: str, *, now: bool = False, drain_s: float | None = None) -> RetiredDevice:
        """Remove a device, connected or offline, and keep it away; its reports stay. Admins only.

        The farm waits until what the device runs has ended, then revokes the tokens that are its agent's alone and refuses the
        agent. An agent with other devices keeps its token.

        Args:
            now: whether to end what the device runs instead of waiting for it.
            drain_s: how long what it runs may take; an hour when None.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, DEVICES_BUSY, BAD_RETIREMENT, PERMISSION_DENIED.
        """
        request = device_pb2.RetireDeviceRequest(device_id=device_id, now=now, drain_s=drain_s)
        try:
            retired = await self._open.devices.Retire(request)
        except EtfarmError as error:
            if not _is_done_before(error):
                raise
            retired = device_pb2.RetireDeviceResponse(device=device_pb2.Device(id=device_id, name=device_id))
        return decoded(RetiredDevice, retired)

    async def agents(self) -> list[Agent]:
        """Return the known agent identities and the principals whose tokens may use them. Admins only."""
        request = agent_pb2.ListAgentsRequest()
        rows = self._rows(self._open.agents.ListAgents, request, "agents")
        return [decoded(Agent, agent) async for agent in rows]

    async def bind_agent(self, agent_id: str, principal: str) -> Agent:
        """Bind an agent identity to the principal whose token may use it from now on. Admins only.

        Raises:
            EtfarmError: AGENT_NOT_FOUND, PERMISSION_DENIED.
        """
        request = agent_pb2.BindAgentRequest(agent_id=agent_id, principal=principal)
        return decoded(Agent, await self._open.agents.BindAgent(request))

    async def remove_agent(self, agent: str) -> RemovedAgent:
        """Remove an agent without devices: revoke the tokens that are its alone, and forget its identity. Admins only.

        Args:
            agent: its id, or the name of a principal with this agent only.

        Raises:
            EtfarmError: AGENT_NOT_FOUND, AGENT_AMBIGUOUS, AGENT_HAS_DEVICES, PERMISSION_DENIED.
        """
        try:
            removed = await self._open.agents.RemoveAgent(agent_pb2.RemoveAgentRequest(agent_id=agent))
        except EtfarmError as error:
            if not _is_done_before(error):
                raise
            removed = agent_pb2.RemoveAgentResponse(agent=agent_pb2.Agent(agent_id=agent))
        return decoded(RemovedAgent, removed)

    async def upload_wheel(self, path: str | Path) -> str:
        """Upload a wheel of etfarm for `upgrade_agent`, and return its digest.

        Raises:
            EtfarmError: as ArtifactService.Upload says.
        """
        path = Path(path)
        artifact = await chunks.artifact_of_file(path)
        await transfers.upload_missing(self._open, {artifact.digest: (artifact, path)})
        return artifact.digest

    async def upgrade_agent(
        self, agent_id: str, digest: str, *, drain_s: float | None = None, time_limit_s: float | None = None
    ) -> AsyncIterator[UpgradeProgress]:
        """Upgrade a connected agent to an uploaded wheel, and yield each step; leaving the iteration early ends the wait.

        Its devices are drained meanwhile. An agent whose new version does not connect runs its former version again.

        Args:
            digest: the wheel, as `upload_wheel` returns it.
            drain_s: how long the devices' runs may take; an hour when None.
            time_limit_s: how long the new version may take to connect; a minute when None.

        Raises:
            EtfarmError: AGENT_OFFLINE, UPGRADE_NOT_ALLOWED, UPGRADE_RUNNING, DEVICES_BUSY, UPGRADE_FAILED; NOT_A_WHEEL;
                PERMISSION_DENIED.
        """
        request = agent_pb2.UpgradeAgentRequest(agent_id=agent_id, digest=digest, drain_s=drain_s, time_limit_s=time_limit_s)
        try:
            async for message in self._open.agents.UpgradeAgent(request):
                yield decoded(UpgradeProgress, message)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, server=self._open.server) from None

    async def restrict_device(self, device_id: str, projects: Sequence[str]) -> Device:
        """Let a device run only the jobs and sessions of some projects, or of all projects if `projects` is empty. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, PROJECT_NOT_FOUND; PERMISSION_DENIED.
        """
        request = device_pb2.RestrictDeviceRequest(device_id=device_id, projects=projects)
        return decoded(Device, await self._open.devices.Restrict(request))

    async def label_device(self, device_id: str, labels: Mapping[str, str], *, remove: Sequence[str] = ()) -> Device:
        """Set and remove labels of a device, which take precedence over those that its agent reports. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, BAD_LABEL; PERMISSION_DENIED.
        """
        request = device_pb2.LabelDeviceRequest(device_id=device_id, set=labels, remove=remove)
        return decoded(Device, await self._open.devices.Label(request))

    async def drain_device(self, device_id: str, reason: str = "") -> Device:
        """Place nothing new on a device until it is undrained; what it runs continues. Admins only.

        Args:
            device_id: an id, a unique prefix of an id, or a name.
            reason: why, for people who wait for the device; at most 200 characters.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, LIMIT_EXCEEDED; PERMISSION_DENIED.
        """
        request = device_pb2.DrainDeviceRequest(device_id=device_id, reason=reason)
        return decoded(Device, await self._open.devices.Drain(request))

    async def undrain_device(self, device_id: str) -> Device:
        """Let runs be placed on a drained device again. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND; PERMISSION_DENIED.
        """
        request = device_pb2.DrainDeviceRequest(device_id=device_id, undrain=True)
        return decoded(Device, await self._open.devices.Drain(request))

    def reserve(
        self,
        selector: str = "",
        *,
        count: int = 1,
        minutes: float = 10.0,
        reason: str = "",
        on_end: Callable[[EtfarmError], None] | None = None,
    ) -> AsyncReservation:
        """Return a reservation of devices, for the jobs and sessions that name it.

        The devices are reserved when it is entered with `async with`, all or none, and released at the end of the block. In
        between, the reservation is renewed.

            async with farm.reserve("arch=aarch64", count=2, minutes=30) as reservation:
                job = await farm.bench("x.pte", reservation=reservation.id)

        Args:
            selector: selects the devices; idle ones are preferred, and emulated ones are chosen last. A busy device is the
                holder's as soon as its current run ends.
            count: number of devices.
            minutes: time after which the reservation ends if this process cannot renew it.
            reason: why, for people who wait for the devices; at most 200 characters.
            on_end: called with the reason if the reservation ends before the block.

        Raises:
            UserError: `selector` is not a selector. Entering it raises DEVICES_UNAVAILABLE, NO_SUCH_DEVICE, BAD_RESERVATION.
        """
        from etfarm.client.fleet.reservation import AsyncReservation

        selectors.parse(selector)
        request = device_pb2.ReserveDeviceRequest(selector=selector, count=count, duration_s=minutes * 60, reason=reason)
        return AsyncReservation(lambda: self._open, request, on_end)

    async def reserve_devices(
        self, selector: str = "", *, count: int = 1, minutes: float = 10.0, reason: str = ""
    ) -> ReservationInfo:
        """Reserve devices for the given time, without renewals: see `renew_reservation` and `release_reservation`.

        Args:
            selector, count, minutes, reason: as in `reserve`.

        Raises:
            EtfarmError: DEVICES_UNAVAILABLE, NO_SUCH_DEVICE, BAD_RESERVATION, QUOTA_EXCEEDED.
        """
        selectors.parse(selector)
        request = device_pb2.ReserveDeviceRequest(
            selector=selector, count=count, duration_s=minutes * 60, reason=reason, request_id=str(uuid.uuid4())
        )
        return decoded(ReservationInfo, await self._open.devices.Reserve(request))

    async def renew_reservation(self, reservation_id: str, *, minutes: float | None = None) -> ReservationInfo:
        """Let a reservation end `minutes` from now, or its own duration from now when None.

        Raises:
            EtfarmError: RESERVATION_NOT_FOUND, RESERVATION_ENDED, BAD_RESERVATION; NOT_YOURS.
        """
        duration_s = None if minutes is None else minutes * 60
        request = device_pb2.RenewReservationRequest(reservation_id=reservation_id, duration_s=duration_s)
        return decoded(ReservationInfo, await self._open.devices.Renew(request))

    async def release_reservation(self, reservation_id: str) -> None:
        """End a reservation. What runs on its devices continues; what waits for them fails.

        Raises:
            EtfarmError: RESERVATION_NOT_FOUND; NOT_YOURS.
        """
        await self._open.devices.Release(device_pb2.ReleaseReservationRequest(reservation_id=reservation_id))

    async def reservations(self) -> list[ReservationInfo]:
        """Return the current reservations of the caller's projects, the next to expire first."""
        request = device_pb2.ListReservationsRequest()
        rows = self._rows(self._open.devices.ListReservations, request, "reservations")
        return [decoded(ReservationInfo, message) async for message in rows]

    async def watch_devices(self, selector: str = "", *, telemetry: bool = True) -> AsyncIterator[DeviceChange]:
        """Yield the devices that match, and then each change, until the caller leaves.

        A caller that reads slowly gets the latest state of a device. A broken stream is continued.

        Args:
            telemetry: whether to yield a device also when only its telemetry has changed, at each heartbeat.

        Raises:
            UserError: `selector` is not a selector.
            EtfarmError: QUOTA_EXCEEDED; SERVER_UNREACHABLE if the server does not come back.
        """
        from etfarm.client.fleet import watches

        selectors.parse(selector)
        async for change in watches.watch_devices(self._open, selector, telemetry=telemetry):
            yield change

    async def device_telemetry(
        self, device_id: str, *, since: datetime | None = None, until: datetime | None = None
    ) -> list[Telemetry]:
        """Return the stored readings of a device, oldest first: one a minute for a day, and one in ten minutes for a week.

        Args:
            since, until: times; without a limit when None.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, BAD_TIME_RANGE.
        """
        request = device_pb2.ListDeviceTelemetryRequest(
            device_id=device_id,
            start_time=to_timestamp(since),
            end_time=to_timestamp(until),
            page_size=TELEMETRY_PAGE_SIZE,
        )
        rows = self._rows(self._open.devices.ListTelemetry, request, "telemetry")
        return [decoded(Telemetry, message) async for message in rows]

    async def device_health(self, device_id: str, *, limit: int = 100) -> list[HealthEvent]:
        """Return what happened to a device's health, newest first: faults, health runs, and what was done about them.

        `Device.health` has what followed from it.

        Args:
            device_id: an id, a unique prefix of an id, or a name.
            limit: maximum number of events, at least 1; the farm keeps at most 1,000 for each device.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND.
            UserError: `limit` is less than 1.
        """
        if limit < 1:
            raise UserError(f"`limit` must be at least 1, got {limit}.")
        request = device_pb2.ListHealthEventsRequest(device_id=device_id)
        rows = self._rows(self._open.devices.ListHealthEvents, request, "events", limit=limit)
        return [decoded(HealthEvent, event) async for event in rows]

    async def check_device(self, device_id: str) -> HealthEvent:
        """Run the farm's health program on a device, after what it runs now, and return the result.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, HEALTH_RUN_IMPOSSIBLE, HEALTH_RUN_ABORTED; PERMISSION_DENIED.
        """
        request = device_pb2.CheckHealthRequest(device_id=device_id)
        return decoded(HealthEvent, await self._open.devices.CheckHealth(request))

    async def clear_device(self, device_id: str) -> Device:
        """Make a device GOOD: its faults no longer count, and its speed gets a new baseline. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND; PERMISSION_DENIED.
        """
        request = device_pb2.ClearHealthRequest(device_id=device_id)
        return decoded(Device, await self._open.devices.ClearHealth(request))

    @property
    def projects(self) -> AsyncProjects:
        """The farm's projects."""
        return AsyncProjects(self._open)

    @property
    def webhooks(self) -> AsyncWebhooks:
        """The receivers of the farm's notices, and the log of deliveries."""
        return AsyncWebhooks(self._open)

    @property
    def artifacts(self) -> AsyncArtifacts:
        """The artifacts of the caller's projects."""
        return AsyncArtifacts(self._open)

    async def create_project(self, name: str, members: Sequence[str] = (), *, storage_limit_bytes: int | None = None) -> Project:
        """Create a project; the same as `create` of `projects`."""
        return await self.projects.create(name, members, storage_limit_bytes=storage_limit_bytes)

    async def recipes(self) -> list[RecipeInfo]:
        """Return all recipes, with what the server lacks for those that it cannot run."""
        request = compile_pb2.ListRecipesRequest()
        rows = self._rows(self._open.compiler.ListRecipes, request, "recipes")
        return [decoded(RecipeInfo, recipe) async for recipe in rows]

    async def bundles(self) -> list[Bundle]:
        """Return the runner bundles that the farm sends to devices, newest first."""
        request = farm_pb2.ListBundlesRequest()
        rows = self._rows(self._open.farm.ListBundles, request, "bundles")
        return [decoded(Bundle, bundle) async for bundle in rows]

    async def add_bundle(self, path: str | Path, *, on_upload: transfers.Moved | None = None) -> Bundle:
        """Upload a runner bundle and offer it to the devices of its architecture.

        Raises:
            EtfarmError: NOT_A_BUNDLE; PERMISSION_DENIED.
        """
        path = Path(path)
        artifact = await chunks.artifact_of_file(path)
        blobs: dict[str, tuple[Any, transfers.Source]] = {artifact.digest: (artifact, path)}
        await transfers.upload_missing(self._open, blobs, on_progress=on_upload)
        request = farm_pb2.AddBundleRequest(digest=artifact.digest)
        return decoded(Bundle, await self._open.farm.AddBundle(request))

    async def info(self) -> ServerInfo:
        """Return information about the server, including what it is still starting."""
        request = farm_pb2.GetServerInfoRequest()
        return decoded(ServerInfo, await self._open.farm.GetServerInfo(request))

    async def server_status(self) -> ServerStatus:
        """Return the server's settings without secrets, and its metrics. For admins.

        Raises:
            EtfarmError: PERMISSION_DENIED.
        """
        return decoded(ServerStatus, await self._open.farm.GetServerStatus(farm_pb2.GetServerStatusRequest()))


def _is_done_before(error: EtfarmError) -> bool:
    """Return whether what a repeated call is to remove is gone: the first call removed it, and its answer was lost."""
    return error.is_repeated and error.kind is Kind.NOT_FOUND
