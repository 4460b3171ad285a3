"""The values of devices that the library returns: their states, health, reservations and readings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from etfarm.wire.errors import EtfarmError


class DeviceState(StrEnum):
    """The current activity of a device."""

    IDLE = "IDLE"
    BUSY = "BUSY"
    OFFLINE = "OFFLINE"
    DRAINING = "DRAINING"
    UNUSABLE = "UNUSABLE"
    """Connected, but no run can be placed on it now; `Device.problem` has the reason."""


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


class HealthState(StrEnum):
    """What the farm thinks of a device's reliability, whatever its activity."""

    UNKNOWN = "UNKNOWN"
    """No health run has finished yet."""
    GOOD = "GOOD"
    SUSPECT = "SUSPECT"
    """Used only if no healthy device matches."""
    QUARANTINED = "QUARANTINED"
    """Not used until its health runs pass."""


@dataclass(frozen=True)
class DeviceHealth:
    """The reliability of a device, as its faults and health runs show it."""

    state: HealthState = HealthState.UNKNOWN
    reason: str = ""
    """Why it is not GOOD; empty if it is."""
    since: datetime | None = None
    """Since when it has this state; None if nothing is known yet."""
    fault_score: float = 0.0
    """The sum of its faults, each of which counts less as it ages."""
    last_run_at: datetime | None = None
    """When the last health run finished; None if none has."""
    next_run_at: datetime | None = None
    """When the next health run is due; None if none is planned."""


@dataclass(frozen=True)
class HealthRun:
    """One run of the farm's health program, whose outputs are known."""

    trigger: str
    """Why it ran: `ENROLMENT`, `PERIODIC`, `FAULT`, `PROBE` or `REQUEST`."""
    passed: bool
    program: str
    runner: str
    """Digest of the runner bundle, or kind and version of the device's own runner."""
    threads: int
    load_ns: int | None
    p50_ns: float | None
    """The median; None if the run only checked the outputs."""
    doubts: tuple[str, ...]
    """Codes of why the median is not compared with other runs."""
    baseline_ns: float | None
    """The device's usual median; None until enough health runs are known."""
    duration_s: float


@dataclass(frozen=True)
class HealthEvent:
    """Something that happened to a device's health."""

    device_id: str
    at: datetime
    kind: str
    """`FAULT`, `RUN`, `CLEARED`, `RECOVERED` or `POWER_CYCLED`."""
    reason: str
    """Reason of the error of a fault or a failed run, such as `DEVICE_SELF_TEST_FAILED`."""
    message: str
    attempt_id: str
    """The attempt; empty if it belongs to another project."""
    state: HealthState
    """The device's health after the event."""
    fault_score: float
    run: HealthRun | None = None
    """Present for a `RUN`."""
    exit_code: int | None = None
    """Exit code of the command of a `POWER_CYCLED`; None if it did not end in time."""


@dataclass(frozen=True)
class ReservationInfo:
    """Devices that are reserved for the jobs and sessions which name the reservation."""

    id: str
    """The reservation's id; empty for a reservation of another project."""
    owner: str
    """Empty for a reservation of another project, as `reason` is."""
    expires_at: datetime
    """When it ends unless it is renewed, by the server's clock."""
    device_ids: tuple[str, ...] = ()
    project: str = ""
    selector: str = ""
    reason: str = ""
    created_at: datetime | None = None
    duration_s: float = 0.0
    """The time for which each renewal extends it, in seconds."""


@dataclass(frozen=True)
class Telemetry:
    """The stored readings of a device at one time."""

    at: datetime
    values: Mapping[str, float | bool]
    """Values that the device has; keys end with their unit, as in `temperature_c`."""


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
    """Id of the attempt that it runs, the oldest if there are several; empty when idle."""
    operator_count: int | None
    runner: str = ""
    """The runner that runs would use now: `native` (the farm's bundle), else an installed one; empty if there is none."""
    is_runner_coming: bool = False
    """Whether the farm is still building the first runner for it, so that `runner` and `backends` are not known yet."""
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
    reservation: ReservationInfo | None = None
    """Present while the device is reserved."""
    health: DeviceHealth = field(default_factory=DeviceHealth)
    attempt_ids: tuple[str, ...] = ()
    """Ids of all attempts that it runs, oldest first."""
    concurrent_runs: int = 1
    """Maximum number of runs at the same time, if none of them is measured; a measurement is always alone."""
    agent_version: str = ""
    """Version of etfarm of its agent, connected or not; empty if unknown."""


@dataclass(frozen=True)
class DeviceChange:
    """A device that was added or has changed, or that is gone."""

    device_id: str
    device: Device | None
    """The device; None if it no longer matches the watch, or if the farm has forgotten it."""
