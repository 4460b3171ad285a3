"""What a run measured: its latency, its loading times, its memory, and how the measurement was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from etfarm.client.reports.enums import Execution, RepeatabilityOutcome, StopReason
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.samples import Samples


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OutputDifference(JsonObject):
    """One output of two executions with the same inputs."""

    output: str
    first: Execution | None = field(default=None, metadata={"key": "one"})
    """The one execution."""
    second: Execution | None = field(default=None, metadata={"key": "other"})
    """The other execution."""
    differing: int | None = None
    """Number of elements that differ; None if they cannot be compared one by one (another shape or dtype)."""
    elements: int | None = None
    """Number of elements."""
    max_abs_difference: float | None = None
    """The largest absolute difference; None without numbers to subtract."""
    at: tuple[int, ...] = ()
    """The index of the largest difference, one number for each dim."""
    rounding: float | None = None
    """The largest absolute difference that rounding explains; None for integers, and if a difference is not finite."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Repeatability(JsonObject):
    """Whether executions on the same inputs, with the same number of threads, gave the same outputs."""

    outcome: RepeatabilityOutcome | None = None
    differences: tuple[OutputDifference, ...] = ()
    """One for each output that differs; empty if all are equal."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Measurement(JsonObject):
    """How the timed pass was made."""

    warmup: int = 0
    """Number of iterations before the timed pass."""
    iterations: int = 0
    """Number of timed iterations."""
    duration_ns: int = 0
    """Wall time of the timed pass, in nanoseconds."""
    stop_reason: StopReason | None = None
    """Why the timed pass ended."""
    steady: bool | None = None
    """Whether the running median was steady at the end of the warm-up; None if the number of iterations was prescribed."""
    warmup_ns: int | None = None
    """Wall time of the warm-up, in nanoseconds."""
    repeatability: Repeatability | None = None
    """None if it was not checked."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Latency(JsonObject):
    """The latency of one execution of the method: the timed pass, which is never traced.

    A percentile is None if no sample is expected beyond it.
    """

    samples_ns: Samples = field(default_factory=Samples)
    """Latency of each timed iteration in nanoseconds, int64, in the order measured; of the shape (iterations,).

    Empty if the farm no longer stores the samples.
    """
    min_ns: float | None = None
    """The fastest iteration, in nanoseconds."""
    p50_ns: float | None = None
    """The median, in nanoseconds; of several runs, the geometric mean of the valid runs' medians."""
    p90_ns: float | None = None
    """The 90th percentile, in nanoseconds."""
    p99_ns: float | None = None
    """The 99th percentile, in nanoseconds."""
    mean_ns: float | None = None
    """The mean, in nanoseconds."""
    stddev_ns: float | None = None
    """The standard deviation of the samples, in nanoseconds."""
    p50_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the median's 95 % confidence interval, in nanoseconds, by a block bootstrap.

    None if there are too few samples for an interval. With three or more valid runs it is that of `run_spread`, which also
    covers the variation between them.
    """
    p10_ns: float | None = None
    """The 10th percentile, in nanoseconds."""
    drift: float | None = None
    """Change of the median from the first third to the last: 0.1 is 10 % slower, -0.1 is 10 % faster."""
    effective_samples: float | None = None
    """Number of independent samples with the same information about the median; at most the number of samples."""
    slow_share: float | None = None
    """Fraction of the samples in the slower of two groups, 0 to 1; None if they form one group. Each process counts relative to
    its own pace."""
    slow_ratio: float | None = None
    """Median of the slower group over that of the faster one."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Load(JsonObject):
    """The times before the timed pass."""

    load_ns: int | None = None
    """Time to load the program, in nanoseconds."""
    load_method_ns: int | None = None
    """Time to load the method, in nanoseconds."""
    first_run_ns: int | None = None
    """Time of the first execution, in nanoseconds."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Memory(JsonObject):
    """The memory of the run."""

    peak_rss_bytes: int | None = None
    """The largest resident set of the runner's process, in bytes."""
    planned_bytes: tuple[int, ...] | None = None
    """The sizes of the memory plan's buffers, in bytes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PairedRatio(JsonObject):
    """The latency of a candidate relative to the first candidate, measured in alternating rounds on one device."""

    base_cell: str
    """Id of the first candidate's cell."""
    ratio: float = 0.0
    """This candidate's median over the base's, of the middle round: 0.9 is 10 % faster."""
    ratio_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of the ratio's 95 % confidence interval; None with too few rounds."""
    rounds: int = 0
    """Number of rounds."""
    process_pairs: int = 0
    """Number of times that both processes were started."""
    ratios: tuple[float, ...] = ()
    """The ratio of each round, in the order measured; of the shape (rounds,)."""
