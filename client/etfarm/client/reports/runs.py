"""The processes that measured a program, and how much their medians vary."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.enums import RunSpreadSource, StopReason
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.latency import Load
from etfarm.client.reports.telemetry import Telemetry
from etfarm.client.reports.verdict import Verdict


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run(JsonObject):
    """One process that measured the program. Its samples follow those of the runs before it in `latency.samples_ns`."""

    warmup: int = 0
    """Number of iterations before the timed pass."""
    iterations: int = 0
    """Number of timed iterations, which is the number of its samples."""
    duration_ns: int = 0
    """Wall time of the timed pass, in nanoseconds."""
    stop_reason: StopReason | None = None
    """Why the timed pass ended."""
    steady: bool | None = None
    """Whether the running median was steady at the end of the warm-up; None if the number of iterations was prescribed."""
    warmup_ns: int | None = None
    """Wall time of the warm-up, in nanoseconds."""
    p50_ns: float | None = None
    """The median of this run, in nanoseconds."""
    p50_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the median's 95 % confidence interval within this run, in nanoseconds."""
    drift: float | None = None
    """Change of the median from the first third to the last: 0.1 is 10 % slower, -0.1 is 10 % faster."""
    verdict: Verdict | None = None
    """The verdict on this run alone."""
    load: Load | None = None
    telemetry: Telemetry | None = None
    """Counters over the timed pass, without `series`."""
    slow_share: float | None = None
    """Fraction of the samples in the slower of two groups, 0 to 1; None if they form one group."""
    slow_ratio: float | None = None
    """Median of the slower group over that of the faster one."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RunSpread(JsonObject):
    """How much the medians of separate runs of one program on one device vary.

    Each run is a process of its own, with its own memory layout, clock frequency and neighbours. `latency.p50_ci95_ns` of a
    single run covers only the variation within it.
    """

    source: RunSpreadSource | None = None
    """Where the spread comes from."""
    runs: int = 0
    """Number of runs that it was estimated from, for a HISTORY of reports; 0 for a PRIOR that is a constant."""
    relative_stddev: float = 0.0
    """Standard deviation of the logarithm of a run's median, for a HISTORY of the median over all runs: 0.02 is 2 %."""
    p50_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the median's 95 % confidence interval, in nanoseconds, which covers the variation within
    and between runs."""
