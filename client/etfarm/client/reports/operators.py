"""The operators of the traced pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etfarm.client.reports.enums import OperatorKind
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.source import SourceLine
from etfarm.client.reports.telemetry import Telemetry
from etfarm.client.reports.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Profile(JsonObject):
    """The traced pass."""

    iterations: int = 0
    """Number of traced executions."""
    p50_ns: float = 0.0
    """Median time of one traced execution of the method, in nanoseconds."""
    times_ns: tuple[int, ...] | None = None
    """Time of each traced execution in nanoseconds, in order; of the shape (iterations,)."""
    shown: int | None = None
    """Index in `times_ns` of the execution that `Operator.start_ns` and `Operator.duration_ns` are of."""
    mean_ns: float | None = None
    """Mean time over the typical executions, those in the middle half by time: the whole of `Operator.share`."""
    mean_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the 95 % interval of `mean_ns` within this run; None below 6 executions."""
    drift: float | None = None
    """The change of the median from the first third of the pass to the last: 0.1 is 10 % slower."""
    traced_ratio: float | None = None
    """Median traced time over the median untraced time of the same process, the last run's: what tracing costs, 1 if nothing."""
    events: int | None = None
    """Number of events that the tracer recorded in one execution."""
    event_cost_ns: float | None = None
    """Difference of both medians for each event; None if the difference is within both intervals, or the traced pass
    was disturbed or drifted.
    """
    telemetry: Telemetry | None = None
    """Counters over the traced pass; None if the runner does not report them."""
    verdict: Verdict | None = None
    """Whether the times of the operators can be trusted. `Report.verdict` is about the timed pass."""
    slow_share: float | None = None
    """Fraction of the executions in the slower of two groups, 0 to 1; None if they form one group."""
    slow_ratio: float | None = None
    """Median of the slower group over that of the faster one."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Operator(JsonObject):
    """One row of the profile: an operator, a delegate, a kernel inside a delegate, or the rest.

    All times are of the traced pass, in nanoseconds; None if below the clock's resolution.
    """

    index: int = 0
    """Index of the row, in the order of execution, from 0."""
    kind: OperatorKind | None = None
    parent: int | None = None
    """Index of the delegate's row; None at the top level."""
    name: str = ""
    op_types: tuple[str, ...] = ()
    """Names of the operators in the graph, such as `aten.convolution.default`."""
    backend: str | None = None
    """The delegate's backend, such as `XnnpackBackend`; None for the runtime's own kernels."""
    delegated: bool = False
    p50_ns: float | None = None
    """The median over all executions. Medians of rows do not add up; `mean_ns` is the time beside `share`."""
    mean_ns: float | None = None
    """The time: `share` of `Profile.mean_ns`, which is the mean over the typical executions, plus half a step where a delegate's
    clock rounds down.
    """
    resolution_ns: float | None = None
    """The resolution of the clock, in nanoseconds."""
    share: float | None = None
    """Part of `Profile.mean_ns`, 0 to 1; the shares of leaves and rows of kind REST sum to 1."""
    module: str | None = None
    """Path of the module in the user's model, such as `layer1.conv`."""
    source: SourceLine | None = None
    """The line of the user's model; None if unknown."""
    aligned: bool | None = None
    """Whether a kernel was matched with the graph; None for other kinds."""
    instruction_id: int | None = None
    debug_handles: tuple[int, ...] = ()
    times_ns: tuple[int, ...] | None = None
    """Time of each traced execution in nanoseconds, in order, in whole multiples of `resolution_ns`.

    Of the shape (iterations,), as `Profile.times_ns`; None for a row without times.
    """
    p10_ns: float | None = None
    """The 10th percentile."""
    p90_ns: float | None = None
    """The 90th percentile."""
    start_ns: float | None = None
    """Start in the execution `Profile.shown`, relative to the start of the method."""
    duration_ns: float | None = None
    """Duration in the execution `Profile.shown`."""
    reconstructed: bool = False
    """Whether `start_ns` is not measured: a delegate reported durations only, and its kernels are laid end to end."""
    sources: tuple[SourceLine, ...] = ()
    """All lines of a row that stands for several operators, that of `source` first; empty for zero or one."""
    unaligned_reason: str | None = None
    """Why the kernels of a delegate have no source lines; None if they have."""
    mean_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the 95 % interval of `mean_ns` within this run, with `rounding_ns`; None below 6
    executions.
    """
    rounding_ns: float | None = None
    """By how much a delegate's clock may have rounded `mean_ns` up or down; None if none did."""
    input_rows: tuple[int, ...] = ()
    """Indices of the rows whose outputs this row takes, all before it; empty if unknown."""
    source_reason: str | None = None
    """Why there is no `source`; or what a kernel is for that is no operator of the model, such as an inserted transposition: then
    `source` is the line of the operator that needs it. None for a row with the lines of its own operators.
    """


class Operators(tuple[Operator, ...]):
    """The operators of a report in the order of execution: a tuple, which notebooks show as a table."""

    __slots__ = ()

    def to_pandas(self) -> pd.DataFrame:
        """Return a pandas DataFrame with a row for each operator.

        The columns are the fields of `Operator`, times in nanoseconds, with the source as `file`, `line` and `code`.
        `op_types`, `debug_handles` and `times_ns` have a list in each row.

        Raises:
            EXTRA_MISSING: pandas is not installed.
        """
        from etfarm.client.reports.frames import operators_frame

        return operators_frame([row.to_dict() for row in self])

    def _repr_html_(self) -> str:
        from etfarm.client.formats import notebook

        return notebook.operators([row.to_dict() for row in self])

    @classmethod
    def of(cls, rows: Iterable[Operator]) -> Operators:
        """Return the operators of several rows."""
        return cls(rows)
