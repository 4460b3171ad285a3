"""DeviceService: the devices of the farm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Final

from etfarm.server.access.projects import Projects
from etfarm.server.devices import telemetry
from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.reservations import Holder, Request, Reservations
from etfarm.server.devices.retirement import Retirement
from etfarm.server.devices.watch import DeviceWatch
from etfarm.server.jobs.health.probing import Probing
from etfarm.server.jobs.records.quotas import Counted, Quotas
from etfarm.server.rpc.door.caller import active_project, caller, scope
from etfarm.server.rpc.door.roles import ADMIN
from etfarm.server.rpc.services.times import read_time
from etfarm.server.state.paging import PAGE_SIZES, page_of, page_size, page_start
from etfarm.v1 import device_pb2, device_pb2_grpc
from etfarm.wire import selectors
from etfarm.wire.errors import error_for

_PAGE_BYTES: Final = 4 << 20
"""Maximum total size of the devices of a page; a single device may exceed it."""


_DRAIN_S: Final = 3600.0
_MAX_DRAIN_S: Final = 86_400.0
"""How long what a device runs may take before it is retired, by default and at most."""


class DeviceService(device_pb2_grpc.DeviceServiceServicer):
    """The servicer of DeviceService; see device.proto."""

    def __init__(
        self,
        registry: Registry,
        projects: Projects,
        reservations: Reservations,
        log: telemetry.TelemetryLog,
        watch: DeviceWatch,
        quotas: Quotas,
        health: HealthBook,
        probing: Probing,
        retirement: Retirement,
    ) -> None:
        self._retirement = retirement
        self._health = health
        self._probing = probing
        self._registry = registry
        self._projects = projects
        self._reservations = reservations
        self._log = log
        self._watch = watch
        self._checks = Counted("health_checks_per_user", "requested health runs", quotas.health_checks_per_user)
        self._streams = Counted("streams_per_user", "watches of devices", quotas.streams_per_user)

    async def List(self, request: device_pb2.ListDevicesRequest, context: object) -> device_pb2.ListDevicesResponse:
        selector = selectors.parse(request.selector)
        start, size = page_start(request.page_token), page_size(request.page_size, *PAGE_SIZES)
        devices, following = await self._registry.page(selector, start, size, _PAGE_BYTES, scope())
        token = "" if following is None else str(following)
        return device_pb2.ListDevicesResponse(devices=map(self._registry.describe, devices), next_page_token=token)

    async def Get(self, request: device_pb2.GetDeviceRequest, context: object) -> device_pb2.Device:
        return self._registry.describe(self._registry.get(request.device_id, scope()))

    async def Watch(self, request: device_pb2.WatchDevicesRequest, context: object) -> AsyncIterator[device_pb2.DeviceEvent]:
        selector = selectors.parse(request.selector)
        with self._streams.hold(caller().name):
            async with aclosing(self._watch.events(selector, scope(), telemetry=request.telemetry)) as events:
                async for event in events:
                    yield event

    async def Reserve(self, request: device_pb2.ReserveDeviceRequest, context: object) -> device_pb2.Reservation:
        wanted = Request(
            request.selector, request.duration_s, caller().name, active_project(), request.count or 1, request.reason,
            request.request_id,
        )  # fmt: skip
        return await self._reservations.reserve(wanted, partial(self._registry.devices, scope()))

    async def Renew(self, request: device_pb2.RenewReservationRequest, context: object) -> device_pb2.Reservation:
        duration_s = request.duration_s if request.HasField("duration_s") else None
        return await self._reservations.renew(request.reservation_id, duration_s, _holder())

    async def Release(
        self, request: device_pb2.ReleaseReservationRequest, context: object
    ) -> device_pb2.ReleaseReservationResponse:
        await self._reservations.release(request.reservation_id, _holder())
        return device_pb2.ReleaseReservationResponse()

    async def ListReservations(
        self, request: device_pb2.ListReservationsRequest, context: object
    ) -> device_pb2.ListReservationsResponse:
        listed, following = page_of(self._reservations.current(scope()), request.page_size, request.page_token)
        return device_pb2.ListReservationsResponse(reservations=listed, next_page_token=following)

    async def ListTelemetry(
        self, request: device_pb2.ListDeviceTelemetryRequest, context: object
    ) -> device_pb2.ListDeviceTelemetryResponse:
        start, end = read_time(request, "start_time"), read_time(request, "end_time")
        size, after = page_size(request.page_size, *telemetry.PAGE_SIZES), page_start(request.page_token)
        device = self._registry.get(request.device_id, scope())
        readings, following = await self._log.page(device.id, start, end, size, after)
        token = "" if following is None else str(following)
        return device_pb2.ListDeviceTelemetryResponse(telemetry=readings, next_page_token=token)

    async def Label(self, request: device_pb2.LabelDeviceRequest, context: object) -> device_pb2.Device:
        return self._registry.describe(await self._registry.label(request.device_id, request.set, request.remove))

    async def Drain(self, request: device_pb2.DrainDeviceRequest, context: object) -> device_pb2.Device:
        if request.undrain:
            return self._registry.describe(await self._registry.undrain(request.device_id))
        drained = await self._registry.drain(request.device_id, request.reason, caller().name)
        return self._registry.describe(drained)

    async def Forget(self, request: device_pb2.ForgetDeviceRequest, context: object) -> device_pb2.ForgetDeviceResponse:
        forgotten = await self._registry.forget(request.device_id)
        await self._forget(forgotten.id)
        return device_pb2.ForgetDeviceResponse()

    async def Retire(self, request: device_pb2.RetireDeviceRequest, context: object) -> device_pb2.RetireDeviceResponse:
        drain_s = request.drain_s if request.HasField("drain_s") else _DRAIN_S
        if not 0 <= drain_s <= _MAX_DRAIN_S:
            raise error_for(
                "BAD_RETIREMENT",
                f"`drain_s` must be 0 to {_MAX_DRAIN_S:g} seconds, got {drain_s:g}.",
                field="drain_s",
                got=drain_s,
            )
        retired = await self._retirement.retire(
            request.device_id, at_once=request.now, drain_s=drain_s, principal=caller().name
        )  # fmt: skip
        await self._forget(retired.device.id)
        return device_pb2.RetireDeviceResponse(
            device=retired.device, revoked_token_ids=retired.revoked, other_device_ids=retired.others,
            ended_attempt_ids=retired.ended,
        )  # fmt: skip

    async def ListHealthEvents(
        self, request: device_pb2.ListHealthEventsRequest, context: object
    ) -> device_pb2.ListHealthEventsResponse:
        before, size = page_start(request.page_token), page_size(request.page_size, *PAGE_SIZES)
        device = self._registry.get(request.device_id, scope())
        events, following = await self._health.events(device.id, before, size, scope())
        return device_pb2.ListHealthEventsResponse(events=events, next_page_token=following)

    async def CheckHealth(self, request: device_pb2.CheckHealthRequest, context: object) -> device_pb2.HealthEvent:
        device = self._registry.get(request.device_id, scope())
        with self._checks.hold(caller().name):
            return await self._probing.check(device, caller=caller().name, is_admin=caller().role == ADMIN)

    async def ClearHealth(self, request: device_pb2.ClearHealthRequest, context: object) -> device_pb2.Device:
        device = self._registry.get(request.device_id)
        await self._health.clear(device.id, caller().name)
        return self._registry.describe(self._registry.get(device.id))

    async def _forget(self, device_id: str) -> None:
        """Delete the readings and the health of a device that the registry has forgotten."""
        await self._log.forget(device_id)
        await self._health.forget(device_id)

    async def Restrict(self, request: device_pb2.RestrictDeviceRequest, context: object) -> device_pb2.Device:
        projects = {self._projects.require(name) for name in request.projects}
        return self._registry.describe(await self._registry.restrict(request.device_id, projects))


def _holder() -> Holder:
    """Return the caller as the holder of a reservation."""
    return Holder(caller().name, caller().role == ADMIN, scope())
