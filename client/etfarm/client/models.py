"""The values that the library returns to its users; no gRPC type is among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from etfarm.client.device_models import Cluster as Cluster
from etfarm.client.device_models import Device as Device
from etfarm.client.device_models import DeviceChange as DeviceChange
from etfarm.client.device_models import DeviceHealth as DeviceHealth
from etfarm.client.device_models import DeviceState as DeviceState
from etfarm.client.device_models import Drain as Drain
from etfarm.client.device_models import HealthEvent as HealthEvent
from etfarm.client.device_models import HealthRun as HealthRun
from etfarm.client.device_models import HealthState as HealthState
from etfarm.client.device_models import ReservationInfo as ReservationInfo
from etfarm.client.device_models import Telemetry as Telemetry
from etfarm.client.job_models import Cell as Cell
from etfarm.client.job_models import CellChanged as CellChanged
from etfarm.client.job_models import Event as Event
from etfarm.client.job_models import JobChanged as JobChanged
from etfarm.client.job_models import JobInfo as JobInfo
from etfarm.client.job_models import JobPage as JobPage
from etfarm.client.job_models import LogLine as LogLine
from etfarm.client.job_models import Progress as Progress
from etfarm.client.job_models import Queue as Queue
from etfarm.client.job_models import QueuedRun as QueuedRun
from etfarm.client.reports.enums import CellState as CellState
from etfarm.client.reports.enums import JobState as JobState
from etfarm.wire.errors import EtfarmError

if TYPE_CHECKING:
    from etfarm.client.reports.documents import Report as Report
    from etfarm.client.reports.result import JobResult as JobResult


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
class Collected:
    """What a collection of artifacts deleted, or would delete."""

    count: int
    size_bytes: int
    kept_bytes: int
    """Size of the artifacts that remain."""
    released_bytes: int
    """Size of the artifacts that remain and no longer count against a project, once for each project."""


@dataclass(frozen=True)
class RetentionResult:
    """What one limit of the server's retention deleted, or would delete."""

    name: str
    """`jobs`, `logs`, `cache`, `artifacts` or `audit`."""
    limit: str
    """The limit, such as `90d,20GiB`, or `forever`."""
    count: int
    size_bytes: int
    """Approximate size of what was deleted; of cached results, that of the files which no job needs."""
    kept_count: int | None = None
    """Of a limit of the size of jobs: number of live and tagged jobs, which count for it and are never deleted; else None."""
    kept_bytes: int | None = None
    """Their size."""


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
    version: str = ""
    """Its version of etfarm, connected or not; empty if it is unknown."""
    host: str = ""
    """The name of its machine; empty if it is offline."""
    allows_upgrade: bool = False
    """Whether it is connected, and installs wheels that the farm offers."""
    retired: bool = False
    """Whether its last device was retired: it is refused until it is bound again or enrols."""
    outdated: bool = False
    """Whether it is connected, and of an etfarm before 0.3.0: its devices get no work until it is upgraded."""


@dataclass(frozen=True)
class RemovedAgent:
    """An agent that was removed."""

    agent: Agent
    """The agent as it was."""
    revoked_tokens: tuple[str, ...]
    """Ids of the tokens that were the agent's alone."""


@dataclass(frozen=True)
class RetiredDevice:
    """A device that was retired."""

    device: Device
    """The device as it was."""
    revoked_tokens: tuple[str, ...]
    """Ids of the tokens that were its agent's alone."""
    other_devices: tuple[str, ...]
    """Ids of its agent's other devices, because of which the agent stays admitted."""
    ended_attempts: tuple[str, ...]
    """The attempts that were ended instead of waited for."""


@dataclass(frozen=True)
class UpgradeProgress:
    """A step of an agent's upgrade."""

    phase: str
    """DRAINING, DOWNLOADING, INSTALLING, RESTARTING, DONE."""
    version: str
    """The new version of etfarm."""
    former_version: str
    message: str
    """What is waited for; may be empty."""


@dataclass(frozen=True)
class Webhook:
    """A receiver of the farm's notices."""

    id: str
    url: str
    events: tuple[str, ...]
    """`job.ended`, `gate.failed`, `device.quarantined`, `device.offline`."""
    created_at: datetime
    created_by: str
    """The principal; empty for one of the server's options."""
    configured: bool
    """Whether it comes from the server's options."""
    waiting: int
    """Number of notices that wait to be sent."""
    dropped: int
    """Number of notices that were dropped because too many waited."""


@dataclass(frozen=True)
class WebhookDelivery:
    """One notice to one receiver."""

    number: int
    event_id: str
    """Identifies the event; equal for all receivers and tries."""
    event: str
    webhook_id: str
    """The webhook; empty for an address of a job."""
    url: str
    job_id: str
    project: str
    state: str
    """HELD until the job has ended; PENDING, DELIVERED or FAILED."""
    attempts: int
    """Number of tries."""
    status: int | None
    """HTTP status of the last answer; None without one."""
    error: str
    """Why the last try failed; empty if it did not."""
    answer: str
    """The beginning of the last answer."""
    created_at: datetime
    next_at: datetime | None
    """When it is tried next; None if it is not."""
    ended_at: datetime | None
    """When it was delivered or given up; None before."""


@dataclass(frozen=True)
class NotifySecret:
    """The secret that signs the notices to the addresses of a project's jobs."""

    project: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class AgentWheel:
    """A wheel of etfarm that the server has for its agents."""

    version: str
    digest: str
    """For `upgrade_agent`."""


@dataclass(frozen=True)
class FarmServer:
    """One of several servers of a farm, which share its database."""

    address: str
    """The address at which the other servers reach it."""
    version: str
    leads: bool
    started_at: datetime


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
    protocol_version: int
    """The newest version of the contract that the server speaks."""
    server_time: datetime | None = None
    """The server's clock when it answered; None for servers that do not report it."""
    token_expires_at: datetime | None = None
    """The end of the caller's token; None if it does not expire."""
    certificate_expires_at: datetime | None = None
    """The end of the server's certificate; None without TLS."""
    is_stopping: bool = False
    """Whether the server finishes running work and refuses new work."""
    disk_free_bytes: int | None = None
    """Free space on the disk of the server's data; None for servers that do not report it."""
    is_disk_full: bool = False
    """Whether new work is refused because the disk is full."""
    agent_wheel: AgentWheel | None = None
    """The wheel to which agents are upgraded by default; None if the server has none."""
    servers: tuple[FarmServer, ...] = ()
    """The farm's servers, the one that leads first; empty for a single server without PostgreSQL."""
    forwarded_by: str = ""
    """The address of the server that forwarded the call to the one that leads; empty if that one was called."""


@dataclass(frozen=True)
class ServerSetting:
    """The effective value of an option of the server."""

    name: str
    value: str
    """The value for people, without secrets."""
    source: str
    """Where the value comes from: the option, the environment variable, the file with the line, or `default`."""


@dataclass(frozen=True)
class MetricSample:
    """A value of a metric."""

    suffix: str
    """What follows the metric's name: `_total`, `_count`, `_sum`; empty for a gauge."""
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Metric:
    """Something that the server measures of itself."""

    name: str
    help: str
    kind: str
    """`counter`, `gauge`, `histogram`, ..."""
    samples: tuple[MetricSample, ...]


@dataclass(frozen=True)
class ServerStatus:
    """The settings and metrics of a server."""

    settings: tuple[ServerSetting, ...]
    metrics: tuple[Metric, ...]
    """Empty for a server that collects no metrics."""


def __getattr__(name: str) -> object:
    """Import `Report` or `JobResult` on its first use: commands that show no report do without their many classes."""
    if name in ("Report", "JobResult"):
        from etfarm.client import reports

        return getattr(reports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
