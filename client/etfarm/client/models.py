"""The values that the library returns to its users; no gRPC type is among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from etfarm.client.formats import phases
from etfarm.client.message_models import Agent as Agent
from etfarm.client.message_models import AgentWheel as AgentWheel
from etfarm.client.message_models import Artifact as Artifact
from etfarm.client.message_models import Bundle as Bundle
from etfarm.client.message_models import Cell as Cell
from etfarm.client.message_models import Cluster as Cluster
from etfarm.client.message_models import Collected as Collected
from etfarm.client.message_models import Device as Device
from etfarm.client.message_models import DeviceHealth as DeviceHealth
from etfarm.client.message_models import DeviceState as DeviceState
from etfarm.client.message_models import Drain as Drain
from etfarm.client.message_models import FarmServer as FarmServer
from etfarm.client.message_models import HealthEvent as HealthEvent
from etfarm.client.message_models import HealthRun as HealthRun
from etfarm.client.message_models import HealthState as HealthState
from etfarm.client.message_models import JobInfo as JobInfo
from etfarm.client.message_models import LogLine as LogLine
from etfarm.client.message_models import Metric as Metric
from etfarm.client.message_models import MetricSample as MetricSample
from etfarm.client.message_models import NotifySecret as NotifySecret
from etfarm.client.message_models import Progress as Progress
from etfarm.client.message_models import Project as Project
from etfarm.client.message_models import QueuedRun as QueuedRun
from etfarm.client.message_models import RecipeInfo as RecipeInfo
from etfarm.client.message_models import RemovedAgent as RemovedAgent
from etfarm.client.message_models import ReservationInfo as ReservationInfo
from etfarm.client.message_models import RetentionResult as RetentionResult
from etfarm.client.message_models import RetiredDevice as RetiredDevice
from etfarm.client.message_models import ServerInfo as ServerInfo
from etfarm.client.message_models import ServerSetting as ServerSetting
from etfarm.client.message_models import ServerStatus as ServerStatus
from etfarm.client.message_models import UpgradeProgress as UpgradeProgress
from etfarm.client.message_models import Webhook as Webhook
from etfarm.client.message_models import WebhookDelivery as WebhookDelivery
from etfarm.client.reports.enums import CellState as CellState
from etfarm.client.reports.enums import JobState as JobState

if TYPE_CHECKING:
    from etfarm.client.reports.documents import Report as Report
    from etfarm.client.reports.result import JobResult as JobResult


@dataclass(frozen=True)
class ArtifactUse:
    """A cell of a job that has an artifact, or a job that was submitted with it."""

    digest: str
    job_id: str
    job_name: str
    cell_label: str
    """Model, recipe, method and threads of the cell; of what the job was submitted with, the model and the method."""
    kind: str
    """`program`, `data file NAME`, `ETRecord` or `outputs` of a cell; `model`, `reference`, `calibration`, `constant` or `inputs`
    of the submission."""


@dataclass(frozen=True)
class JobPage:
    """A page of jobs, newest first."""

    jobs: tuple[JobInfo, ...]
    next_page_token: str
    """Token of the next page; empty on the last page."""


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


Event = JobChanged | CellChanged | Progress | LogLine


@dataclass(frozen=True)
class Telemetry:
    """The stored readings of a device at one time."""

    at: datetime
    values: Mapping[str, float | bool]
    """Values that the device has; keys end with their unit, as in `temperature_c`."""


@dataclass(frozen=True)
class DeviceChange:
    """A device that was added or has changed, or that is gone."""

    device_id: str
    device: Device | None
    """The device; None if it no longer matches the watch, or if the farm has forgotten it."""


def __getattr__(name: str) -> object:
    """Import `Report` or `JobResult` on its first use: commands that show no report do without their many classes."""
    if name in ("Report", "JobResult"):
        from etfarm.client import reports

        return getattr(reports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
