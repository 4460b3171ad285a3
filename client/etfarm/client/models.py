"""The values that the library returns to its users; no gRPC type is among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

from etfarm.client.formats import phases, units
from etfarm.client.reports.enums import CellState as CellState
from etfarm.client.reports.enums import JobState as JobState
from etfarm.wire.errors import EtfarmError

if TYPE_CHECKING:
    from etfarm.client.reports.report import Report as Report
    from etfarm.client.reports.result import JobResult as JobResult


class DeviceState(StrEnum):
    """The current activity of a device."""

    IDLE = "IDLE"
    BUSY = "BUSY"
    OFFLINE = "OFFLINE"
    DRAINING = "DRAINING"
    UNUSABLE = "UNUSABLE"
    """Connected, but no run can be placed on it now; `Device.problem` has the reason."""


@dataclass(frozen=True)
class Cell:
    """One candidate on one device choice, with one method and one thread count."""

    id: str
    index: int
    model: str
    recipe: str | None
    """Recipe name; None for a ready program."""
    method: str
    threads: int | None
    """Thread count; the device's default when None."""
    device: str | None
    """Id of the device that the cell was last placed on; None before its first placement."""
    attempts: int
    """Number of placements; more than one after device faults."""
    state: CellState
    waiting_for: str
    """Reason for waiting; empty if there is no notable one."""
    error: EtfarmError | None
    on_device: bool = True
    """Whether a device runs the cell's method. A compile-only cell covers all methods, whatever its method name."""
    p50_ns: float | None = None
    """Median latency of the timed pass in nanoseconds; None until the cell has succeeded, and without a measurement."""
    p50_ci95_ns: tuple[float, ...] = ()
    """The lower and upper end of the median's 95 % interval; empty if unknown."""
    verdict: str | None = None
    """Status of the measurement's verdict, such as VALID; None without a measurement."""

    @property
    def traits(self) -> tuple[str, str, str, str]:
        """Model, recipe, method and threads, which distinguish cells; each is empty if it does not apply."""
        threads = f"{self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        method = self.method if self.on_device and self.method != "forward" else ""
        return self.model, self.recipe or "", method, threads

    @property
    def label(self) -> str:
        """Label that distinguishes a job's cells: `resnet8 · xnnpack_fp32 · encode · 4 threads`."""
        return " · ".join(filter(None, self.traits))

    @property
    def latency(self) -> str:
        """The measured latency: `p50 1.84 ms [1.82, 1.86] VALID`; empty without one."""
        if self.p50_ns is None:
            return ""
        p50, interval = units.median(self.p50_ns, self.p50_ci95_ns)
        return " ".join(filter(None, ("p50", p50, interval, (self.verdict or "").replace("_", " "))))


@dataclass(frozen=True)
class JobInfo:
    """A job as it was when the server was asked."""

    id: str
    name: str
    labels: Mapping[str, str]
    owner: str
    state: JobState
    submitted_at: datetime
    finished_at: datetime | None
    cells: tuple[Cell, ...] = field(default=(), repr=False)
    tags: tuple[str, ...] = ()
    """Tags that refer to the job, such as baselines."""
    project: str = ""
    """The project that owns the job."""


@dataclass(frozen=True)
class JobChanged:
    """Event of a job that was submitted or reached a final state."""

    sequence: int | None
    at: datetime
    job: JobInfo
    """The job, without its cells."""
    job_state: JobState

    def __str__(self) -> str:
        return f"job {self.job.id}: {self.job_state.value}"


@dataclass(frozen=True)
class CellChanged:
    """Event of a cell with a new state or new information."""

    sequence: int | None
    at: datetime
    cell: Cell
    job_state: JobState

    def __str__(self) -> str:
        cell = self.cell
        why = f": {cell.error}" if cell.error is not None else f" ({cell.waiting_for})" if cell.waiting_for else ""
        why = why or (f", {cell.latency}" if cell.latency else "")
        return f"{cell.label}: {cell.state.value}{why}"


@dataclass(frozen=True)
class Progress:
    """The current activity of a running cell.

    Only the latest matters; it has no sequence number.
    """

    at: datetime
    cell_id: str
    actor: str
    """SERVER, or a device's name."""
    phase: str
    """A compile stage, or LOAD, WARMUP, TIMED, TRACED and so on."""
    duration_ms: float | None
    """Duration of the phase in ms; set when the phase just ended."""
    done: int | None
    total: int | None
    message: str
    sequence: None = None
    p50_ns: float | None = None
    """Median of the samples in nanoseconds, when the phase TIMED just ended."""

    def __str__(self) -> str:
        took = f" {self.duration_ms:.0f} ms" if self.duration_ms is not None else ""
        far = f" {100 * self.done / self.total:.0f} %" if self.done is not None and self.total else ""
        detail = f": {self.message}" if self.message else ""
        actor = f" ({self.actor})" if self.actor else ""
        p50 = f", p50 {units.time(self.p50_ns)}" if self.p50_ns is not None else ""
        return f"cell {self.cell_id}: {phases.describe(self.phase)}{took}{far}{actor}{p50}{detail}"


@dataclass(frozen=True)
class LogLine:
    """A line that a compiler or runner printed."""

    at: datetime
    number: int
    """Line number within the job, from 1."""
    cell_id: str
    source: str
    """COMPILE, RUNNER, ANALYSIS or FARM."""
    text: str
    sequence: None = None

    def __str__(self) -> str:
        return f"{self.source.lower()}: {self.text}"


Event = JobChanged | CellChanged | Progress | LogLine


@dataclass(frozen=True)
class Cluster:
    """A set of cores of one kind."""

    part: str
    cpus: tuple[int, ...]
    physical_cores: int
    max_frequency_hz: int | None
    governor: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Drain:
    """Why and since when nothing new is placed on a device."""

    reason: str
    principal: str
    """Who drained the device."""
    started_at: datetime


@dataclass(frozen=True)
class Device:
    """A device known to the farm."""

    id: str
    agent_id: str
    name: str
    arch: str
    soc: str
    os: str
    cores: int
    memory_bytes: int
    emulated: bool
    features: tuple[str, ...]
    clusters: tuple[Cluster, ...]
    labels: Mapping[str, str]
    backends: tuple[str, ...]
    state: DeviceState
    last_seen_at: datetime | None
    attempt_id: str
    """Id of the attempt that it runs; empty when idle."""
    operator_count: int | None
    runner: str = ""
    """The runner that runs would use now: `native` (the farm's bundle), else an installed one; empty if there is none."""
    own_runners: tuple[str, ...] = ()
    """Kinds of the runners that are installed on it, such as `python`; used if the farm has no bundle for it."""
    telemetry: Mapping[str, float | bool] = field(default_factory=dict)
    """Values of the last heartbeat that the device has; keys end with their unit, as in `temperature_c`."""
    model: str = ""
    """Product name, if `soc` does not contain it: `Google Pixel 8`."""
    page_size_bytes: int | None = None
    thermal_zones: tuple[str, ...] = ()
    """Names of its temperature sensors."""
    has_battery: bool | None = None
    """Whether it has a battery; None if unknown."""
    problem: EtfarmError | None = None
    """Why no run can be placed on it now, with the remedy; None if it is usable."""
    projects: tuple[str, ...] = ()
    """The caller's projects among those that the device is restricted to; empty for an unrestricted device."""
    drain: Drain | None = None
    """Present while the device is drained, offline or not."""


@dataclass(frozen=True)
class Project:
    """A project: the owner of jobs, artifacts, sessions, tags and reports, which its members see."""

    name: str
    created_by: str
    members: tuple[str, ...]
    storage_limit_bytes: int | None
    """Storage limit in bytes; the server's default when None."""
    storage_bytes: int
    live_jobs: int


@dataclass(frozen=True)
class RecipeInfo:
    """A recipe, and whether the server can run it."""

    name: str
    summary: str
    backend: str
    quantization: str
    available: bool
    missing: str
    """What the server lacks for it; empty when available."""
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Bundle:
    """A runner that the farm sends to devices of its architecture."""

    digest: str
    size_bytes: int
    arch: str
    executorch: str
    source_digest: str
    backends: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Artifact:
    """A file that the farm stores for a project, by its digest."""

    digest: str
    size_bytes: int
    project: str
    owner: str
    """The principal that stored it."""
    created_at: datetime


@dataclass(frozen=True)
class Agent:
    """An agent identity and the principal whose token may use it."""

    agent_id: str
    principal: str
    """The principal; empty if the identity is not bound."""
    connected: bool
    device_ids: tuple[str, ...]
    refused_principal: str
    """The principal that last tried to connect as this unbound identity; empty if there was none."""


@dataclass(frozen=True)
class ServerInfo:
    """Information about the server."""

    version: str
    principal: str
    role: str
    workers_ready: bool
    devices_online: int
    devices_known: int
    live_jobs: int
    starting: str
    """What the server is still starting; empty when ready."""
    bundle_error: EtfarmError | None
    """Why there is no runner bundle for the server's own architecture; None unless building one failed."""


def __getattr__(name: str) -> object:
    """Import `Report` or `JobResult` on its first use: commands that show no report do without their many classes."""
    if name in ("Report", "JobResult"):
        from etfarm.client import reports

        return getattr(reports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
