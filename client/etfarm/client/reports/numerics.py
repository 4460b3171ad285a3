"""The accuracy of outputs, and the numeric gap of each operator."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.compilation import ProgramFile
from etfarm.client.reports.enums import NumericReference
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.source import SourceLine


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Accuracy(JsonObject):
    """One output of the device, compared with a reference on the same inputs."""

    output: str
    """Name of the output."""
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    reference: str = ""
    """What the output is compared with, such as `program before quantization`."""
    equal: bool | None = None
    """Whether all elements are equal."""
    max_abs_error: float | None = None
    """The largest absolute difference."""
    mean_abs_error: float | None = None
    """The mean absolute difference."""
    cosine: float | None = None
    """The cosine similarity, -1 to 1."""
    sqnr_db: float | None = None
    """The signal-to-noise ratio in dB, 300 for an exact match; None for NaN or inf of one side, a zero reference, integers."""
    relative_error: float | None = None
    """The norm of the error over the norm of the reference; None as `sqnr_db` is."""
    top1_agreement: float | None = None
    """Part of the rows along the last dim whose largest element has the same index, 0 to 1; for classifiers only."""
    nan_count: int | None = None
    """Number of elements that are NaN."""
    reference_nan_count: int | None = None
    """Number of the reference's elements that are NaN."""
    equal_share: float | None = None
    """Part of the elements that are equal, 0 to 1; for integers and bools only."""
    samples: int | None = None
    """Number of samples, each with its own inputs, that the numbers are of together; None in reports of older releases."""
    sqnr_db_min: float | None = None
    """The lowest signal-to-noise ratio of a single sample, in dB; of those that have one if others have NaN."""
    sqnr_db_max: float | None = None
    """The highest signal-to-noise ratio of a single sample, in dB."""
    samples_digest: str | None = None
    """Digest of the inputs of all samples, equal in reports of the same ones; None for one sample."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ValueSummary(JsonObject):
    """The elements of one value; of a quantized value, the numbers that it represents."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    min: float | None = None
    """The smallest finite element; None without finite elements."""
    max: float | None = None
    """The largest finite element."""
    mean: float | None = None
    """The mean of the finite elements."""
    stddev: float | None = None
    """The standard deviation of the finite elements."""
    nan_count: int = 0
    infinite_count: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ValueHistogram(JsonObject):
    """The elements of the expected and of the actual value, over the same bins of equal width from `low` to `high`."""

    low: float = 0.0
    high: float = 0.0
    expected: tuple[int, ...] = ()
    """Number of elements in each bin; of the shape (bins,)."""
    actual: tuple[int, ...] = ()
    """Number of elements in each bin; of the shape (bins,)."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NumericGap(JsonObject):
    """The output of one operator on the device, compared with the same value on the host.

    Operators that cannot be told apart are one group.
    """

    ops: tuple[str, ...] = ()
    """Names of the operators in the graph."""
    snr_db: float | None = None
    """The signal-to-noise ratio in dB, capped at 300 for an exact match; None for NaN or an all-zero reference."""
    mse: float | None = None
    """The mean squared error."""
    l1: float | None = None
    """The sum of the absolute differences."""
    max_abs_error: float | None = None
    """The largest absolute difference."""
    source: SourceLine | None = None
    reference: NumericReference | None = None
    module: str | None = None
    """Path of the module in the user's model."""
    sources: tuple[SourceLine, ...] = ()
    """All lines of a group; empty for zero or one."""
    debug_handles: tuple[int, ...] = ()
    backend: str | None = None
    expected: ValueSummary | None = None
    """The value on the host."""
    actual: ValueSummary | None = None
    """The value on the device."""
    histogram: ValueHistogram | None = None
    first_bad: bool = False
    """Whether this is the first operator that differs by more than rounding explains."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Numerics(JsonObject):
    """How the numeric gap was computed."""

    program: ProgramFile | None = None
    """The program of the numerics pass."""
    is_timed_program: bool = False
    """Whether that is the timed program itself, not one with a delegate for each operator."""
    threshold_db: float | None = None
    """Loss in dB beyond rounding from which an operator counts as bad; None if the pass had no result."""
    first_bad: int | None = None
    """Index in `Report.numeric_gap` of the first bad operator; None without one."""
    judged: int | None = None
    """Number of values that were judged; None if the pass had no result."""
    timed_sqnr_db: float | None = None
    """The lowest signal-to-noise ratio of an output of the timed program, in dB, against the program on the host that operators
    are judged by."""
    sqnr_db: float | None = None
    """The same of an output of the numerics pass's program."""
    wrong_only_when_fused: bool | None = None
    """Whether the timed program is far from the one on the host, although no operator alone is; None if unknown."""
