"""The values of jobs that the library returns: jobs and their cells, the queue, and the events of a watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from etfarm.client.formats import phases, units
from etfarm.client.reports.enums import CellState, JobState
from etfarm.wire.errors import EtfarmError


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
    started_at: datetime | None = None
    """When the last placement on a device began; None before the first one."""
    phase: str = ""
    """What a live cell did or waited for, as `Progress.phase`; empty if unknown."""

    @property
    def is_waiting(self) -> bool:
        """Whether the cell waits: for a device, or for its turn at the server."""
        return self.state in (CellState.QUEUED, CellState.WAITING_FOR_DEVICE) or (
            not self.state.is_terminal and phases.is_wait(self.phase)
        )

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
class JobPage:
    """A page of jobs, newest first."""

    jobs: tuple[JobInfo, ...]
    next_page_token: str
    """Token of the next page; empty on the last page."""


@dataclass(frozen=True)
class QueuedRun:
    """What waits for a device as one run: a cell, interleaved cells together, or a session."""

    rank: int
    """Position in the queue of the whole farm, from 1."""
    job_id: str
    """Empty for a session."""
    job_name: str
    session_id: str
    """Empty for a job's cells."""
    cell_ids: tuple[str, ...]
    """The cells that wait as one run; empty for a session."""
    model: str
    """Name of the first cell's model; empty for a session."""
    recipe: str | None
    method: str
    selector: str
    """The devices that it asks for; any when empty."""
    reservation: str
    """Id of the reservation whose devices it asks for; empty without one."""
    exclusive: bool
    """Whether it must be alone on the device: a measurement or a session."""
    priority: int
    """Priority as submitted."""
    aged_priority: float
    """Priority with what the time since the submission and a deadline add to it."""
    share_penalty: float
    """What is subtracted from `aged_priority` for the device time that the project and the owner used lately; the highest
    difference goes first."""
    waiting_since: datetime
    """Since when it waits for a device."""
    waiting_for: str
    """What it waits for; empty if it only waits for its turn."""
    expires_at: datetime | None
    """When it fails unless it has started; None without a limit."""
    starts_at: datetime | None
    """Estimate of its start, if every run takes as long as equal ones did and nothing else is submitted; None if unknown."""
    owner: str
    project: str


@dataclass(frozen=True)
class Queue:
    """What waits for a device."""

    runs: tuple[QueuedRun, ...]
    """Runs of the caller's projects, first ones first."""
    other_runs: int
    """Number of runs that wait in other projects."""


@dataclass(frozen=True)
class JobChanged:
    """Event of a job that was submitted or reached a final state."""

    sequence: int | None
    at: datetime
    job: JobInfo
    """The job, without its cells."""
    job_state: JobState

    def __str__(self) -> str:
        return f"job {self.job.id}: {phases.describe_state(self.job_state.value)}"


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
        return f"{cell.label}: {phases.describe_state(cell.state.value)}{why}"


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
