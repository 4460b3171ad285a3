"""FarmService: the farm as a whole, and its runner bundles."""

from __future__ import annotations

from collections.abc import Callable

from etfarm.server.access.scope import Scope
from etfarm.server.compile.keys import toolchain
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.registry import Registry
from etfarm.server.rpc.door.caller import caller, scope
from etfarm.server.state.paging import page_of
from etfarm.server.workers.jail.measures import JailReport
from etfarm.v1 import agent_pb2, farm_pb2, farm_pb2_grpc
from etfarm.v1.common_pb2 import Role
from etfarm.wire.status import to_proto


class FarmService(farm_pb2_grpc.FarmServiceServicer):
    """The servicer of FarmService; see farm.proto."""

    def __init__(
        self,
        registry: Registry,
        bundles: Bundles,
        *,
        version: str,
        workers_ready: Callable[[], bool],
        live: Callable[[Scope], int],
        jail: Callable[[], JailReport | None],
    ) -> None:
        self._registry = registry
        self._bundles = bundles
        self._version = version
        self._workers_ready = workers_ready
        self._live = live
        self._jail = jail

    async def GetServerInfo(self, request: farm_pb2.GetServerInfoRequest, context: object) -> farm_pb2.ServerInfo:
        seen = scope()
        known, online = self._registry.count(seen)
        ready = self._workers_ready()
        starting = self._bundles.starting or ("" if ready else "warming the compile workers")
        info = farm_pb2.ServerInfo(
            version=self._version,
            workers_ready=ready,
            principal=caller(),
            devices_known=known,
            devices_online=online,
            live_jobs=self._live(seen),
            starting=starting,
            toolchain=toolchain() if ready else None,
        )
        if self._bundles.own_error is not None:
            info.bundle_error.CopyFrom(to_proto(self._bundles.own_error))
        report = self._jail()
        if report is not None and caller().role == Role.ROLE_ADMIN:
            for measure in report.measures:
                info.jail.add(name=measure.name, active=measure.active, detail=measure.detail)
        return info

    async def ListBundles(self, request: farm_pb2.ListBundlesRequest, context: object) -> farm_pb2.ListBundlesResponse:
        bundles, following = page_of(self._bundles.list(), request.page_size, request.page_token)
        return farm_pb2.ListBundlesResponse(bundles=bundles, next_page_token=following)

    async def AddBundle(self, request: farm_pb2.AddBundleRequest, context: object) -> agent_pb2.RunnerBundle:
        return await self._bundles.add(request.digest)
