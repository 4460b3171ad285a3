"""FarmService: the farm as a whole, and its runner bundles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime

from etfarm.server.access.scope import Scope
from etfarm.server.artifacts.room import DiskSpace
from etfarm.server.compile.keys import toolchain
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.wheels import AgentWheel
from etfarm.server.retention.limits import Limits
from etfarm.server.retention.sweep import Retention
from etfarm.server.rpc.door.caller import caller, credential, scope
from etfarm.server.state.paging import page_of
from etfarm.server.workers.jail.measures import JailReport
from etfarm.v1 import agent_pb2, farm_pb2, farm_pb2_grpc
from etfarm.v1.common_pb2 import Role
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
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
        retention: Retention,
        disk: Callable[[], DiskSpace],
        is_stopping: Callable[[], bool] = lambda: False,
        certificate_expires_at: Callable[[], datetime | None] = lambda: None,
        agent_wheel: AgentWheel | None = None,
        measure: Callable[[], Awaitable[Sequence[farm_pb2.Metric]]],
        settings: Sequence[farm_pb2.ServerSetting] = (),
        servers: Callable[[], Sequence[farm_pb2.FarmServer]] = lambda: (),
    ) -> None:
        self._registry = registry
        self._bundles = bundles
        self._version = version
        self._workers_ready = workers_ready
        self._live = live
        self._jail = jail
        self._retention = retention
        self._disk = disk
        self._is_stopping = is_stopping
        self._certificate_expires_at = certificate_expires_at
        self._agent_wheel = agent_wheel
        self._settings = settings
        self._measure = measure
        self._servers = servers

    async def GetServerInfo(self, request: farm_pb2.GetServerInfoRequest, context: object) -> farm_pb2.ServerInfo:
        seen = scope()
        known, online = self._registry.count(seen)
        ready = self._workers_ready()
        starting = self._bundles.starting or ("" if ready else "warming the compile workers")
        info = farm_pb2.ServerInfo(
            version=self._version,
            protocol_version=PROTOCOL_VERSION,
            oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
            workers_ready=ready,
            principal=caller(),
            devices_known=known,
            devices_online=online,
            live_jobs=self._live(seen),
            starting=starting,
            toolchain=toolchain() if ready else None,
            stopping=self._is_stopping(),
            servers=self._servers(),
        )
        info.server_time.FromDatetime(datetime.now(UTC))
        if (expires_at := credential().expires_at) is not None:
            info.token_expire_time.FromDatetime(expires_at)
        if (expires_at := self._certificate_expires_at()) is not None:
            info.certificate_expire_time.FromDatetime(expires_at)
        disk = self._disk()
        info.disk.free_bytes, info.disk.work_bytes, info.disk.full = disk.free_bytes, disk.work_bytes, disk.is_full
        if (wheel := self._agent_wheel) is not None:
            info.agent_wheel.version, info.agent_wheel.digest = wheel.version, wheel.digest
        if self._bundles.own_error is not None:
            info.bundle_error.CopyFrom(to_proto(self._bundles.own_error))
        report = self._jail()
        if report is not None and caller().role == Role.ROLE_ADMIN:
            for measure in report.measures:
                info.jail.add(name=measure.name, active=measure.active, detail=measure.detail)
        return info

    async def GetServerStatus(self, request: farm_pb2.GetServerStatusRequest, context: object) -> farm_pb2.ServerStatus:
        return farm_pb2.ServerStatus(settings=self._settings, metrics=await self._measure())

    async def GetProof(self, request: farm_pb2.GetProofRequest, context: object) -> farm_pb2.FarmProof:
        raise AssertionError("the interceptor answers it, since its callers have no token")

    async def ListBundles(self, request: farm_pb2.ListBundlesRequest, context: object) -> farm_pb2.ListBundlesResponse:
        bundles, following = page_of(self._bundles.list(), request.page_size, request.page_token)
        return farm_pb2.ListBundlesResponse(bundles=bundles, next_page_token=following)

    async def AddBundle(self, request: farm_pb2.AddBundleRequest, context: object) -> agent_pb2.RunnerBundle:
        return await self._bundles.add(request.digest)

    async def ApplyRetention(self, request: farm_pb2.ApplyRetentionRequest, context: object) -> farm_pb2.ApplyRetentionResponse:
        limits = Limits.of(request.keep, self._retention.limits)
        answer = farm_pb2.ApplyRetentionResponse()
        for swept in await self._retention.sweep(limits, dry_run=request.dry_run):
            answer.results.add(
                name=swept.name, limit=str(swept.limit), deleted_count=swept.count, deleted_bytes=swept.size_bytes,
                kept_count=swept.kept_count, kept_bytes=swept.kept_bytes,
            )  # fmt: skip
        return answer
