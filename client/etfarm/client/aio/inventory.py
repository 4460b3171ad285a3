"""The part of `AsyncFarm` that manages what a farm has: devices, agents, projects, recipes and bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etfarm.client.admin.projects import AsyncProjects
from etfarm.client.aio.connected import PAGE_SIZE, AsyncConnected
from etfarm.client.models import Agent, Bundle, Device, Project, RecipeInfo, ServerInfo
from etfarm.client.transport import decode, transfers
from etfarm.client.transport.paging import iterate_pages
from etfarm.v1 import agent_pb2, compile_pb2, device_pb2, farm_pb2
from etfarm.wire import chunks, selectors


class AsyncInventory(AsyncConnected):
    """The devices, agents, projects, recipes and bundles of a farm."""

    async def devices(self, selector: str = "") -> list[Device]:
        """Return the known devices that match, including offline devices.

        Raises:
            UserError: `selector` is not a valid selector.
        """
        selectors.parse(selector)
        request = device_pb2.ListDevicesRequest(selector=selector, page_size=PAGE_SIZE)
        devices: list[Device] = []
        async for page in iterate_pages(self._open.devices.List, request, server=self._open.server):
            devices += [decode.device(device) for device in page.devices]
        return devices

    async def device(self, device_id: str) -> Device:
        """Return a device by its id, a unique prefix of its id, or its name.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND.
        """
        request = device_pb2.GetDeviceRequest(device_id=device_id)
        return decode.device(await self._open.devices.Get(request))

    async def forget_device(self, device_id: str) -> None:
        """Remove an offline device from the farm; its reports stay. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, DEVICE_CONNECTED, PERMISSION_DENIED.
        """
        request = device_pb2.ForgetDeviceRequest(device_id=device_id)
        await self._open.devices.Forget(request)

    async def agents(self) -> list[Agent]:
        """Return the known agent identities and the principals whose tokens may use them. Admins only."""
        request = agent_pb2.ListAgentsRequest(page_size=PAGE_SIZE)
        agents: list[Agent] = []
        async for page in iterate_pages(self._open.agents.ListAgents, request, server=self._open.server):
            agents += [decode.agent(agent) for agent in page.agents]
        return agents

    async def bind_agent(self, agent_id: str, principal: str) -> Agent:
        """Bind an agent identity to the principal whose token may use it from now on. Admins only.

        Raises:
            EtfarmError: AGENT_NOT_FOUND, PERMISSION_DENIED.
        """
        request = agent_pb2.BindAgentRequest(agent_id=agent_id, principal=principal)
        return decode.agent(await self._open.agents.BindAgent(request))

    async def restrict_device(self, device_id: str, projects: Sequence[str]) -> Device:
        """Let a device run only the jobs and sessions of some projects, or of all projects if `projects` is empty. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, PROJECT_NOT_FOUND; PERMISSION_DENIED.
        """
        request = device_pb2.RestrictDeviceRequest(device_id=device_id, projects=projects)
        return decode.device(await self._open.devices.Restrict(request))

    async def label_device(self, device_id: str, labels: Mapping[str, str], *, remove: Sequence[str] = ()) -> Device:
        """Set and remove labels of a device, which take precedence over those that its agent reports. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, BAD_LABEL; PERMISSION_DENIED.
        """
        request = device_pb2.LabelDeviceRequest(device_id=device_id, set=labels, remove=remove)
        return decode.device(await self._open.devices.Label(request))

    async def drain_device(self, device_id: str, reason: str = "") -> Device:
        """Place nothing new on a device until it is undrained; what it runs continues. Admins only.

        Args:
            device_id: an id, a unique prefix of an id, or a name.
            reason: why, for people who wait for the device; at most 200 characters.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND, LIMIT_EXCEEDED; PERMISSION_DENIED.
        """
        request = device_pb2.DrainDeviceRequest(device_id=device_id, reason=reason)
        return decode.device(await self._open.devices.Drain(request))

    async def undrain_device(self, device_id: str) -> Device:
        """Let runs be placed on a drained device again. Admins only.

        Raises:
            EtfarmError: DEVICE_NOT_FOUND; PERMISSION_DENIED.
        """
        request = device_pb2.DrainDeviceRequest(device_id=device_id, undrain=True)
        return decode.device(await self._open.devices.Drain(request))

    @property
    def projects(self) -> AsyncProjects:
        """The farm's projects."""
        return AsyncProjects(self._open)

    async def create_project(self, name: str, members: Sequence[str] = (), *, storage_limit_bytes: int | None = None) -> Project:
        """Create a project; the same as `create` of `projects`."""
        return await self.projects.create(name, members, storage_limit_bytes=storage_limit_bytes)

    async def recipes(self) -> list[RecipeInfo]:
        """Return all recipes, with what the server lacks for those that it cannot run."""
        request = compile_pb2.ListRecipesRequest(page_size=PAGE_SIZE)
        recipes: list[RecipeInfo] = []
        async for page in iterate_pages(self._open.compiler.ListRecipes, request, server=self._open.server):
            recipes += [decode.recipe(recipe) for recipe in page.recipes]
        return recipes

    async def bundles(self) -> list[Bundle]:
        """Return the runner bundles that the farm sends to devices, newest first."""
        request = farm_pb2.ListBundlesRequest(page_size=PAGE_SIZE)
        bundles: list[Bundle] = []
        async for page in iterate_pages(self._open.farm.ListBundles, request, server=self._open.server):
            bundles += [decode.bundle(bundle) for bundle in page.bundles]
        return bundles

    async def add_bundle(self, path: str | Path, *, on_upload: transfers.Moved | None = None) -> Bundle:
        """Upload a runner bundle and offer it to the devices of its architecture.

        Raises:
            EtfarmError: NOT_A_BUNDLE; PERMISSION_DENIED.
        """
        path = Path(path)
        artifact = await chunks.artifact_of_file(path)
        blobs: dict[str, tuple[Any, transfers.Source]] = {artifact.digest: (artifact, path)}
        await transfers.upload_missing(self._open.artifacts, blobs, server=self._open.server, on_progress=on_upload)
        request = farm_pb2.AddBundleRequest(digest=artifact.digest)
        return decode.bundle(await self._open.farm.AddBundle(request))

    async def info(self) -> ServerInfo:
        """Return information about the server, including what it is still starting."""
        request = farm_pb2.GetServerInfoRequest()
        return decode.server_info(await self._open.farm.GetServerInfo(request))
