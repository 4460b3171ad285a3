"""DeviceService: the devices of the farm."""

from __future__ import annotations

from typing import Any, Final

from etfarm.server.access.projects import Projects
from etfarm.server.devices.registry import Registry
from etfarm.server.rpc.door.caller import caller, scope
from etfarm.server.rpc.services.unimplemented import unimplemented
from etfarm.server.state.paging import PAGE_SIZES, page_size, page_start
from etfarm.v1 import device_pb2, device_pb2_grpc
from etfarm.wire import selectors

_PAGE_BYTES: Final = 4 << 20
"""Maximum total size of the devices of a page; a single device may exceed it."""


class DeviceService(device_pb2_grpc.DeviceServiceServicer):
    """The servicer of DeviceService; see device.proto."""

    Watch: Any = unimplemented("DeviceService.Watch")
    Reserve: Any = unimplemented("DeviceService.Reserve")
    Renew: Any = unimplemented("DeviceService.Renew")
    Release: Any = unimplemented("DeviceService.Release")

    def __init__(self, registry: Registry, projects: Projects) -> None:
        self._registry = registry
        self._projects = projects

    async def List(self, request: device_pb2.ListDevicesRequest, context: object) -> device_pb2.ListDevicesResponse:
        selector = selectors.parse(request.selector)
        start, size = page_start(request.page_token), page_size(request.page_size, *PAGE_SIZES)
        devices, following = await self._registry.page(selector, start, size, _PAGE_BYTES, scope())
        token = "" if following is None else str(following)
        return device_pb2.ListDevicesResponse(devices=map(self._registry.describe, devices), next_page_token=token)

    async def Get(self, request: device_pb2.GetDeviceRequest, context: object) -> device_pb2.Device:
        return self._registry.describe(self._registry.get(request.device_id, scope()))

    async def Label(self, request: device_pb2.LabelDeviceRequest, context: object) -> device_pb2.Device:
        return self._registry.describe(await self._registry.label(request.device_id, request.set, request.remove))

    async def Drain(self, request: device_pb2.DrainDeviceRequest, context: object) -> device_pb2.Device:
        if request.undrain:
            return self._registry.describe(await self._registry.undrain(request.device_id))
        drained = await self._registry.drain(request.device_id, request.reason, caller().name)
        return self._registry.describe(drained)

    async def Forget(self, request: device_pb2.ForgetDeviceRequest, context: object) -> device_pb2.ForgetDeviceResponse:
        await self._registry.forget(request.device_id)
        return device_pb2.ForgetDeviceResponse()

    async def Restrict(self, request: device_pb2.RestrictDeviceRequest, context: object) -> device_pb2.Device:
        projects = {self._projects.require(name) for name in request.projects}
        return self._registry.describe(await self._registry.restrict(request.device_id, projects))
