"""The device around the timed pass. What the device does not have is None or empty."""

from __future__ import annotations

from dataclasses import dataclass, field

from etfarm.client.reports.enums import Gate
from etfarm.client.reports.json_object import JsonObject


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CpuReading(JsonObject):
    """One CPU at one moment."""

    cpu: int = 0
    """Number of the logical CPU."""
    frequency_hz: int | None = None
    """The current frequency, in Hz."""
    limit_hz: int | None = None
    """The highest frequency that is allowed now, in Hz."""
    governor: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ThermalZone(JsonObject):
    """A temperature sensor at one moment."""

    name: str = ""
    temperature_c: float = 0.0
    """Temperature in degrees Celsius."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CoolingDevice(JsonObject):
    """What the system does against heat; a state above 0 slows something down."""

    name: str = ""
    state: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SystemReading(JsonObject):
    """The device at one moment."""

    cpus: tuple[CpuReading, ...] = ()
    zones: tuple[ThermalZone, ...] = ()
    cooling: tuple[CoolingDevice, ...] = ()
    throttle_count: int | None = None
    """How often the CPUs were throttled since the start of the system (x86)."""
    battery_share: float | None = None
    """Charge of the battery, 0 to 1."""
    charging: bool | None = None
    load_1m: float | None = None
    """Load average of the last minute."""
    runnable: int | None = None
    """Number of tasks that ran or waited for a CPU, without the agent's own."""
    psi_cpu_avg10: float | None = None
    """Part of the last ten seconds in which some task waited for a CPU, 0 to 1."""
    psi_memory_avg10: float | None = None
    """Part of the last ten seconds in which some task waited for memory, 0 to 1."""
    psi_io_avg10: float | None = None
    """Part of the last ten seconds in which some task waited for a disk, 0 to 1."""
    memory_available_bytes: int | None = None
    """Memory that a new program could use, in bytes."""
    cpu_busy_ns: int | None = None
    """Time since the start of the system that CPUs were not idle, over all CPUs, in nanoseconds."""
    cpu_stolen_ns: int | None = None
    """Time since the start of the system that a hypervisor took from the CPUs, in nanoseconds."""
    elapsed_ms: float = 0.0
    """Time since the start of the timed pass, in milliseconds."""
    screen_on: bool | None = None
    """Whether the screen of a phone was lit."""
    thermal_status: int | None = None
    """Android's thermal status of a phone, from 0 (none) to 6 (shutdown)."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TelemetryPoint(JsonObject):
    """One point of a series during the timed pass."""

    elapsed_ms: float = 0.0
    """Time since the start of the timed pass, in milliseconds."""
    frequency_hz: tuple[int, ...] = ()
    """The highest frequency within each cluster of the device, in Hz; empty if it cannot be read."""
    temperature_c: float | None = None
    """Temperature of the hottest zone, in degrees Celsius."""
    load_1m: float | None = None
    """Load average of the last minute."""
    psi_cpu: float | None = None
    """Part of the time since the previous point in which some task waited for a CPU, 0 to 1."""
    busy_cpus: float | None = None
    """Number of CPUs that were busy on average since the previous point, including the runner."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DeviceSetting(JsonObject):
    """A setting of the device that the agent changed for the run, or could not change."""

    name: str = ""
    """Name of the setting, such as `governor`."""
    cpus: str = ""
    """The logical CPUs, such as `0-3`."""
    previous: str = field(default="", metadata={"key": "found"})
    """The value before the run."""
    wanted: str = ""
    """The value for the run."""
    applied: bool = False
    why: str | None = None
    """Why it was not applied."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GateWait(JsonObject):
    """What a run waited for before it began."""

    gate: Gate | None = None
    waited_ms: float = 0.0
    """Duration of the wait, in milliseconds."""
    passed: bool = False
    """Whether the condition was reached; otherwise the run began without it."""
    measured: float | None = None
    """The last reading: degrees Celsius for COOL, runnable tasks per CPU for IDLE."""
    threshold: float | None = None
    """The limit of the reading."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Telemetry(JsonObject):
    """Counters over the timed pass, and readings around it."""

    cpu_time_ns: int | None = None
    """CPU time of the runner, in nanoseconds."""
    wall_time_ns: int | None = None
    """Wall time of the timed pass, in nanoseconds."""
    voluntary_switches: int | None = None
    """Number of voluntary context switches."""
    involuntary_switches: int | None = None
    """Number of involuntary context switches."""
    minor_faults: int | None = None
    """Number of minor page faults."""
    major_faults: int | None = None
    """Number of major page faults."""
    psi_cpu_some_us: int | None = None
    """Time in which some task of the device waited for a CPU, in microseconds."""
    affinity: str | None = None
    """The logical CPUs that the runner could use, such as `0-3`."""
    before: SystemReading | None = None
    """The device right before the timed pass."""
    after: SystemReading | None = None
    """The device right after the timed pass."""
    series: tuple[TelemetryPoint, ...] = ()
    """At most 120 points during the timed pass."""
    sampler_cpu_ns: int | None = None
    """CPU time that the series took, in nanoseconds."""
    settings: tuple[DeviceSetting, ...] = ()
    waits: tuple[GateWait, ...] = ()
    """The conditions that delayed the run."""
    runners_cpu_ns: int | None = None
    """CPU time of all runners of an interleaved attempt between `before` and `after`, in nanoseconds."""
