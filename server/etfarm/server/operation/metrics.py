"""Prometheus metrics of a server: counted where events happen, and collected from the parts at each scrape."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from etfarm.server.operation.snapshot import Snapshot, state_name
from etfarm.server.state.engine import ConnectionCounts
from etfarm.v1 import common_pb2, farm_pb2
from etfarm.v1.compile_pb2 import Compilation
from etfarm.v1.job_pb2 import Cell, JobEvent, JobState

MAX_PROJECTS: Final = 50
"""Maximum number of projects with series of their own; all others share the label `other`."""

_OTHER: Final = "other"
_RPC_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_WAIT_BUCKETS: Final = (0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_STAGE_BUCKETS: Final = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0)
_LAG_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_DATABASE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_LAG_S: Final = 0.25
"""Interval at which the event loop's lag is measured."""

_SERVER_PHASES: Final = frozenset(
    {"COMPILE", "COMPILE_NUMERICS", "WAIT_FOR_WORKER", "WAIT_FOR_DEVICE", "WAIT_FOR_QUIET", "ANALYZE"}
)
"""Phases of the server in a cell's timeline. Names of an agent's phases are its own choice, so they are no labels."""


class Metrics:
    """The metrics of one server.

    Args:
        version: the server's version.
        project_of: returns the project of a live job; empty if the job is not live.
    """

    def __init__(self, version: str, project_of: Callable[[str], str]) -> None:
        self.registry = CollectorRegistry()
        self.snapshot = Snapshot()
        self._project_of = project_of
        self._projects: set[str] = set()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series, and nothing here needs them
        add = self.registry
        prometheus_client.ProcessCollector(registry=add)
        prometheus_client.PlatformCollector(registry=add)
        prometheus_client.GCCollector(registry=add)
        prometheus_client.Info("etfarm_build", "Version of the server.", registry=add).info({"version": version})
        self._jobs = prometheus_client.Counter(
            "etfarm_jobs_finished", "Jobs that ended, by their last state.", ["state", "project"], registry=add
        )
        self._submitted = prometheus_client.Counter("etfarm_jobs_submitted", "Accepted jobs.", ["project"], registry=add)
        self._cells = prometheus_client.Counter(
            "etfarm_cells_finished", "Cells that ended, by their last state and fault.", ["state", "fault", "project"],
            registry=add,
        )  # fmt: skip
        self._attempts = prometheus_client.Counter(
            "etfarm_attempts", "Ended attempts on devices, by fault.", ["fault"], registry=add
        )
        self._phases = prometheus_client.Histogram(
            "etfarm_cell_phase_seconds", "Duration of the server's phases of cells; WAIT_FOR_DEVICE is the time in the queue.",
            ["phase"], buckets=_WAIT_BUCKETS, registry=add,
        )  # fmt: skip
        self._stages = prometheus_client.Histogram(
            "etfarm_compile_stage_seconds", "Duration of compilation stages that ran.", ["stage"], buckets=_STAGE_BUCKETS,
            registry=add,
        )  # fmt: skip
        self._compilations = prometheus_client.Counter(
            "etfarm_compilations", "Compilations, by outcome: hit (of the cache), ok or failed.", ["outcome"], registry=add
        )
        self._rpcs = prometheus_client.Counter("etfarm_rpcs", "Ended calls.", ["rpc", "code"], registry=add)
        self._rpc_seconds = prometheus_client.Histogram(
            "etfarm_rpc_seconds", "Duration of unary calls.", ["rpc"], buckets=_RPC_BUCKETS, registry=add
        )
        self._rpcs_open = prometheus_client.Gauge("etfarm_rpcs_open", "Calls in progress.", ["rpc"], registry=add)
        self._transactions = prometheus_client.Histogram(
            "etfarm_database_seconds", "Duration of reads and writes of the database, waiting included.", ["kind"],
            buckets=_DATABASE_BUCKETS, registry=add,
        )  # fmt: skip
        self._lag = prometheus_client.Histogram(
            "etfarm_event_loop_lag_seconds", "Delay of a timer of the event loop.", buckets=_LAG_BUCKETS, registry=add
        )
        self._scrape = prometheus_client.Gauge("etfarm_scrape_seconds", "Duration of the previous scrape.", registry=add)
        self.registry.register(_Snapshots(self))

    def began(self, rpc: str) -> None:
        """Record that a call began."""
        self._rpcs_open.labels(rpc).inc()

    def ended(self, rpc: str, code: str, seconds: float, *, is_stream: bool) -> None:
        """Record that a call ended."""
        self._rpcs_open.labels(rpc).dec()
        self._rpcs.labels(rpc, code).inc()
        if not is_stream:
            self._rpc_seconds.labels(rpc).observe(seconds)

    def on_event(self, job_id: str, event: JobEvent) -> None:
        """Count a journaled change of a job or cell."""
        kind = event.WhichOneof("event")
        if kind == "job":
            project = self.label_of(event.job.project)
            if event.sequence == 1:
                self._submitted.labels(project).inc()
            elif event.job.HasField("end_time"):
                self._jobs.labels(JobState.Name(event.job.state).removeprefix("JOB_STATE_"), project).inc()
        elif kind == "cell" and event.cell.report_id:
            self._finished(event.cell, self.label_of(self._project_of(job_id)))

    def _finished(self, cell: Cell, project: str) -> None:
        self._cells.labels(state_name(cell.state), _fault_name(cell.error), project).inc()
        for phase in cell.timeline:
            if phase.actor == common_pb2.ACTOR_SERVER and phase.phase in _SERVER_PHASES:
                self._phases.labels(phase.phase).observe(phase.duration_ms / 1e3)
        for attempt in cell.attempts:
            self._attempts.labels(_fault_name(attempt.error)).inc()

    def on_compiled(self, compilation: Compilation, *, cached: bool) -> None:
        """Count the outcome of a compilation, and the stages that ran for it."""
        failed = compilation.HasField("error")
        self._compilations.labels("hit" if cached else "failed" if failed else "ok").inc()
        for stage in () if cached else compilation.stages:
            if not stage.cached and stage.where == common_pb2.ACTOR_SERVER:
                self._stages.labels(stage.stage).observe(stage.duration_ms / 1e3)

    def on_transaction(self, kind: str, seconds: float) -> None:
        """Count a read or write of the database."""
        self._transactions.labels(kind).observe(seconds)

    def label_of(self, project: str) -> str:
        """Return a project's label; its number of values is bounded."""
        if project not in self._projects:
            if len(self._projects) >= MAX_PROJECTS:
                return _OTHER
            self._projects.add(project)
        return project

    async def measure_lag(self) -> None:
        """Measure the event loop's lag until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self._lag.observe(max(0.0, loop.time() - due))

    def measured(self) -> list[farm_pb2.Metric]:
        """Return all metrics for people: without the buckets of histograms, and without metrics that have no samples."""
        metrics = [_message(family) for family in self.registry.collect()]
        return [metric for metric in metrics if metric.samples]

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the text of all metrics, in the format that the caller accepts."""
        began_s = time.perf_counter()
        encode, content_type = exposition.choose_encoder(accept)
        text = encode(self.registry)
        self._scrape.set(time.perf_counter() - began_s)
        return content_type, text


class _Snapshots(Collector):
    """The metrics that are collected from the last snapshot."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are known without a snapshot."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the state of the farm."""
        now = self._metrics.snapshot
        cells = GaugeMetricFamily("etfarm_cells", "Live cells by state.", labels=["state", "project"])
        for (state, project), number in _bounded(now.cells, self._metrics.label_of).items():
            cells.add_metric([state, project], number)
        yield cells
        jobs = GaugeMetricFamily("etfarm_jobs", "Jobs with live cells.", labels=["project"])
        by_project: Counter[str] = Counter()
        for project, number in now.live_jobs.items():
            by_project[self._metrics.label_of(project)] += number
        for project, number in by_project.items():
            jobs.add_metric([project], number)
        yield jobs
        devices = GaugeMetricFamily("etfarm_devices", "Known devices.", labels=["state", "health"])
        for (state, health), number in now.devices.items():
            devices.add_metric([state, health], number)
        yield devices
        yield GaugeMetricFamily(
            "etfarm_oldest_wait_seconds", "Age of the oldest cell that waits for a device.", value=now.oldest_wait_s
        )
        yield GaugeMetricFamily("etfarm_sessions", "Open sessions.", value=now.sessions)
        yield GaugeMetricFamily(
            "etfarm_stopping", "Whether the server takes no new work before it ends.", value=float(now.is_stopping)
        )
        if now.pool is not None:
            yield GaugeMetricFamily(
                "etfarm_compile_slots", "Compilations and analyses that may run at a time.", value=now.pool.slots
            )
            yield GaugeMetricFamily("etfarm_compile_running", "Compilations and analyses that run.", value=now.pool.running)
            yield GaugeMetricFamily(
                "etfarm_compile_waiting", "Compilations and analyses that wait for their turn.", value=now.pool.waiting
            )
            nodes = GaugeMetricFamily("etfarm_compile_nodes", "Nodes of the Ray cluster.", labels=["state"])
            for state, number in now.pool.nodes.items():
                nodes.add_metric([state], number)
            yield nodes
        if now.disk is not None:
            yield GaugeMetricFamily("etfarm_disk_free_bytes", "Free space of the data's disk.", value=now.disk.free_bytes)
            yield GaugeMetricFamily(
                "etfarm_disk_work_bytes", "Free space below which new work is refused.", value=now.disk.work_bytes
            )
            yield GaugeMetricFamily("etfarm_disk_full", "Whether new work is refused.", value=float(now.disk.is_full))
        downloads = CounterMetricFamily(
            "etfarm_download_bytes", "Bytes of artifacts that were downloaded: through the server, or by links to S3.",
            labels=["via"],
        )  # fmt: skip
        for via, number in sorted(now.downloaded.items()):
            downloads.add_metric([via], number)
        yield downloads
        if now.stored is not None:
            yield GaugeMetricFamily("etfarm_artifacts", "Stored artifacts.", value=now.stored[0])
            yield GaugeMetricFamily("etfarm_artifact_bytes", "Bytes of stored artifacts.", value=now.stored[1])
        if now.connections is not None:
            yield from _connections(now.connections)


def _connections(counts: ConnectionCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily("etfarm_database_connections", "Open connections to PostgreSQL.", value=counts.open)
    yield CounterMetricFamily(
        "etfarm_database_connections_opened", "Connections to PostgreSQL that were opened.", value=counts.opened
    )
    yield CounterMetricFamily("etfarm_database_connections_lost", "Connections to PostgreSQL that broke.", value=counts.lost)
    yield CounterMetricFamily("etfarm_database_round_trips", "Round trips to PostgreSQL.", value=counts.round_trips)
    yield CounterMetricFamily(
        "etfarm_database_unavailable_seconds", "Time for which PostgreSQL accepted no connection.", value=counts.unavailable_s
    )


def _message(family: Metric) -> farm_pb2.Metric:
    metric = farm_pb2.Metric(name=family.name, help=family.documentation, kind=family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(family.name)
        if suffix != "_bucket":
            metric.samples.add(suffix=suffix, labels=sample.labels, value=sample.value)
    return metric


def _fault_name(error: common_pb2.Error) -> str:
    return common_pb2.Fault.Name(error.fault).removeprefix("FAULT_") if error.reason else "NONE"


def _bounded(numbers: Mapping[tuple[str, str], int], label_of: Callable[[str], str]) -> Counter[tuple[str, str]]:
    totals: Counter[tuple[str, str]] = Counter()
    for (state, project), number in numbers.items():
        totals[state, label_of(project)] += number
    return totals
