"""The observation of one server: its metrics, its traces, and the address that serves metrics and health."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import structlog

from etfarm.server.artifacts.s3.blobs import BucketBlobs
from etfarm.server.config import Config
from etfarm.server.devices.registry import Registry
from etfarm.server.jobs import model
from etfarm.server.operation.intake import Intake
from etfarm.server.operation.metrics_page import Answer, MetricsPage, probe
from etfarm.server.operation.snapshot import Snapshot, state_name
from etfarm.server.operation.tracing import Tracing, open_tracing
from etfarm.server.parts import Background, Fleet, Jobs, Storage
from etfarm.server.workers.child_pool import ChildPool
from etfarm.v1 import farm_pb2
from etfarm.v1.device_pb2 import DeviceState, HealthState
from etfarm.wire import selectors

if TYPE_CHECKING:
    from etfarm.server.operation.metrics import Metrics

log = structlog.get_logger()

_FRESH_S: Final = 1.0
"""Time for which scrapes share a snapshot."""
_TOTALS_S: Final = 60.0
"""Time for which the totals of stored artifacts are not computed again: they take a sum over all rows."""
_NO_LIMIT: Final = 1 << 40


class Monitor:
    """Metrics, traces and health of a server. Off unless configured: then nothing is counted and nothing listens."""

    def __init__(
        self, config: Config, storage: Storage, fleet: Fleet, jobs: Jobs, workers: ChildPool, intake: Intake, version: str
    ) -> None:
        self._config = config
        self._storage = storage
        self._registry = fleet.registry
        self._jobs = jobs
        self._workers = workers
        self._intake = intake
        self._taking = asyncio.Lock()
        self._taken_s = -_FRESH_S
        self._totals: tuple[float, tuple[int, int]] | None = None
        self.is_started = False
        """Whether the server answers calls."""
        self.address = ""
        """Address of the metrics; empty without."""
        self.metrics: Metrics | None = None
        """Recorder of metrics; None unless the server runs with `--metrics` or `--web`."""
        if config.metrics is not None or config.web is not None:
            # Imported only if needed: most servers, such as embedded ones, have no metrics.
            from etfarm.server.operation.metrics import Metrics

            self.metrics = Metrics(version, jobs.conductor.project_of)
            jobs.announcer.on_event(self.metrics.on_event)
            jobs.compiler.on_compiled = self.metrics.on_compiled
            storage.database.on_transaction = self.metrics.on_transaction
            if isinstance(storage.store.blobs, BucketBlobs):
                from etfarm.server.operation.s3_metrics import S3Metrics

                self.metrics.registry.register(S3Metrics(storage.store.blobs))
        self._tracing: Tracing | None = None
        if config.otlp is not None:
            self._tracing = open_tracing(config.otlp, version)
            jobs.announcer.on_event(self._tracing.on_event)
        self._page = MetricsPage(
            {"/metrics": self._metrics, "/healthz": probe(lambda: ""), "/readyz": probe(self._why_not_ready)},
            hosts=config.metrics_hosts,
        )

    async def start(self, background: Background) -> None:
        """Listen, if configured.

        Raises:
            CANNOT_LISTEN: the address cannot be used.
        """
        if self.metrics is not None:
            background.start(self.metrics.measure_lag(), "event-loop-lag")
        if self._config.metrics is None:
            return
        self.address = await self._page.start(self._config.metrics)
        log.info("serving metrics", address=self.address)

    async def close(self) -> None:
        """Stop listening, and send the spans that are left."""
        await self._page.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _why_not_ready(self) -> str:
        if self._intake.is_stopping:
            return "stopping"
        return "" if self.is_started else "starting"

    async def _metrics(self, accept: str) -> Answer:
        assert self.metrics is not None
        async with self._taking:
            await self._refresh(self.metrics)
            kind, text = await asyncio.to_thread(self.metrics.render, accept)
        return HTTPStatus.OK, kind, text

    async def measure(self) -> list[farm_pb2.Metric]:
        """Return what `/metrics` shows, as messages; empty unless the server runs with `--metrics` or `--web`."""
        if self.metrics is None:
            return []
        async with self._taking:
            await self._refresh(self.metrics)
            return await asyncio.to_thread(self.metrics.measured)

    async def _refresh(self, metrics: Metrics) -> None:
        if time.monotonic() - self._taken_s > _FRESH_S:
            metrics.snapshot = await self.take_snapshot()
            self._taken_s = time.monotonic()

    async def take_snapshot(self) -> Snapshot:
        """Return the state of the farm. Between slices of the devices, the event loop serves calls."""
        cells: Counter[tuple[str, str]] = Counter()
        waiting_since: list[datetime] = []
        for run in list(self._jobs.conductor.runs()):
            cells[state_name(run.cell.state), run.job.project] += 1
            if run.cell.state == model.WAITING:
                waiting_since.append(run.cell.update_time.ToDatetime(UTC))
        oldest = (datetime.now(UTC) - min(waiting_since)).total_seconds() if waiting_since else 0.0
        return Snapshot(
            cells=cells,
            live_jobs=self._jobs.conductor.live_by_project(),
            devices=await count_devices(self._registry),
            oldest_wait_s=max(0.0, oldest),
            pool=self._workers.measure(),
            disk=self._storage.store.room.measure(),
            stored=await self._stored(),
            connections=self._storage.database.connections,
            downloaded=dict(self._storage.store.downloaded),
            sessions=len(self._jobs.sessions),
            is_stopping=self._intake.is_stopping,
        )

    async def _stored(self) -> tuple[int, int]:
        now = time.monotonic()
        if self._totals is None or now - self._totals[0] > _TOTALS_S:
            self._totals = now, await self._storage.store.holdings.totals()
        return self._totals[1]


async def count_devices(registry: Registry) -> Counter[tuple[str, str]]:
    """Return the numbers of devices by state and health. Between slices, the event loop serves calls."""
    numbers: Counter[tuple[DeviceState.ValueType, HealthState.ValueType]] = Counter()
    devices, _ = await registry.page(selectors.parse(""), 0, _NO_LIMIT, _NO_LIMIT)
    for device in devices:
        numbers[registry.describe(device).state, device.health.state or HealthState.HEALTH_STATE_UNKNOWN] += 1
    return Counter(
        {
            (
                DeviceState.Name(state).removeprefix("DEVICE_STATE_"),
                HealthState.Name(health).removeprefix("HEALTH_STATE_"),
            ): number
            for (state, health), number in numbers.items()
        }
    )
