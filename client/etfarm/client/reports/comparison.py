"""`Comparison`, the document etfarm.comparison/1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.reports.change import Method, NumberChange, OperatorOutcome, Outcome
from etfarm.client.reports.enums import CellState, OperatorKind, VerdictStatus
from etfarm.client.reports.error_facts import ErrorFacts
from etfarm.client.reports.gate_result import GateResult
from etfarm.client.reports.generation_comparison import GenerationComparison
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.result import JobFacts
from etfarm.client.reports.runs import RunSpread
from etfarm.client.reports.source import SourceLine

SCHEMA: Final = "etfarm.comparison/1"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ComparedSide(JsonObject):
    """One side of a comparison."""

    job: JobFacts | None = None
    file: str | None = None
    """Path of the report file."""
    choice: str | None = None
    """The text after `#`, which selects reports."""
    reports: int = 0
    """Number of reports that were compared."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ComparedDevice(JsonObject):
    """The device of a report."""

    id: str | None = None
    name: str | None = None
    arch: str | None = None
    soc: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ComparedVerdict(JsonObject):
    """The verdict of a report."""

    status: VerdictStatus | None = None
    codes: tuple[str, ...] = ()
    """The codes of its reasons."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReportName(JsonObject):
    """A report in a comparison."""

    id: str | None = None
    cell: str | None = None
    attempt: str | None = None
    model: str | None = None
    recipe: str | None = None
    method: str | None = None
    threads: int | None = None
    device: ComparedDevice | None = None
    state: CellState | None = None
    error: str | None = None
    """The reason of its error."""
    verdict: ComparedVerdict | None = None
    cores: str | None = None
    """The cpus that the runner was bound to, as `0-3`; None if it was not bound."""
    inputs: str | None = None
    """SHA-256 of the inputs' tensor file; None if the runner generated them. For generated text, that of the first encoder's
    inputs."""
    inputs_from_job: bool | None = None
    """Whether the job named the inputs; None if that was not recorded."""
    warmup: int | None = None
    """Number of warm-up iterations of a run, if the job prescribed it."""
    timed_ns: int | None = None
    """Duration of the timed passes of all runs, in nanoseconds; None if nothing was timed."""
    runs: int | None = None
    """Number of runs that measured it, in fresh processes; None if nothing was timed."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LatencyComparison(JsonObject):
    """The latencies of a pair, in nanoseconds."""

    ratio: float | None = None
    """The candidate's median over the base's: 0.9 is 10 % faster."""
    ratio_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    method: Method | None = None
    outcome: Outcome | None = None
    rounds: int | None = None
    """Number of rounds of a paired ratio."""
    process_pairs: int | None = None
    """Number of times that both processes were started, of a paired ratio."""
    p50_ns: NumberChange | None = None
    p90_ns: NumberChange | None = None
    p99_ns: NumberChange | None = None
    load_ns: NumberChange | None = None
    load_method_ns: NumberChange | None = None
    first_run_ns: NumberChange | None = None
    same_program: bool = False
    """Whether both sides ran the same program on the same inputs: equal digests, method, runner, threads and cores."""
    base_spread: RunSpread | None = None
    """The spread between runs of the base; None if it is unknown, and for paired ratios."""
    candidate_spread: RunSpread | None = None
    """The spread between runs of the candidate; None if it is unknown, and for paired ratios."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OperatorTime(JsonObject):
    """The operators of one side in a row."""

    name: str | None = None
    """Name of the operator; None for several with different names."""
    indexes: tuple[int, ...] = ()
    """Indexes of its rows in the report."""
    time_ns: float | None = None
    """Time in the traced pass, in nanoseconds."""
    share: float | None = None
    """Part of the traced pass, 0 to 1."""
    time_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the 95 % interval of `time_ns` within its run."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OperatorChange(JsonObject):
    """Operators of both sides that correspond."""

    kind: OperatorKind | None = None
    module: str | None = None
    op_types: tuple[str, ...] = ()
    source: SourceLine | None = None
    base: OperatorTime | None = None
    """None if the operator was added."""
    candidate: OperatorTime | None = None
    """None if the operator was removed."""
    change_ns: float | None = None
    """candidate - base, in nanoseconds."""
    change_share: float | None = None
    """Change of the part of the traced pass, from -1 to 1."""
    change_ci95_ns: tuple[float, float] | None = None
    """The lower and the upper bound of the 95 % interval of `change_ns`, within and between runs as far as known."""
    outcome: OperatorOutcome | None = None
    """NO_DIFFERENCE if the interval contains 0; None if a side lacks the operators."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OperatorChanges(JsonObject):
    """The operators of a pair."""

    by: str = ""
    """OPERATOR or MODULE: what a row stands for."""
    rows: tuple[OperatorChange, ...] = ()
    """The largest changes first."""
    matched_by: str = ""
    """INDEX of one program, GRAPH of the model, or NAME and order of the kernels where a side has no graph, such as a .pte."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SizeComparison(JsonObject):
    """The sizes of the programs, in bytes."""

    total_bytes: NumberChange | None = None
    """The .pte with its data files."""
    pte_bytes: NumberChange | None = None
    program_bytes: NumberChange | None = None
    constant_bytes: NumberChange | None = None
    delegate_bytes: NumberChange | None = None
    data_bytes: NumberChange | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MemoryComparison(JsonObject):
    """The memory of the runs, in bytes."""

    peak_rss_bytes: NumberChange | None = None
    planned_bytes: NumberChange | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OutputErrors(JsonObject):
    """The errors of one side's output against its reference."""

    reference: str | None = None
    equal: bool | None = None
    sqnr_db: float | None = None
    """The signal-to-noise ratio in dB, capped at 300 for an exact match."""
    max_abs_error: float | None = None
    top1_agreement: float | None = None
    nan_count: int | None = None
    samples: int | None = None
    """Number of samples that the numbers are of together."""
    samples_digest: str | None = None
    """Digest of their inputs; None for one sample."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AccuracyComparison(JsonObject):
    """One output of both sides."""

    output: str = ""
    base: OutputErrors | None = None
    candidate: OutputErrors | None = None
    change_db: float | None = None
    """Change of the SQNR in dB; None without a common reference, or of other samples."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NodeCounts(JsonObject):
    """The nodes of one operator on one side."""

    delegated: int = 0
    non_delegated: int = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DelegatedOperator(JsonObject):
    """An operator with different numbers of nodes."""

    op: str = ""
    base: NodeCounts | None = None
    candidate: NodeCounts | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DelegationComparison(JsonObject):
    """The delegation of one method."""

    subgraphs: NumberChange | None = None
    delegated_nodes: NumberChange | None = None
    non_delegated_nodes: NumberChange | None = None
    operators: tuple[DelegatedOperator, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Difference(JsonObject):
    """A circumstance that differs and may explain why numbers changed."""

    what: str = ""
    """Name of what differs, such as `governor`; stable for programs."""
    base: Any = None
    """JSON value; None if absent."""
    candidate: Any = None
    """JSON value; None if absent."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Pair(JsonObject):
    """A report of the candidate and its counterpart in the base."""

    base: ReportName
    candidate: ReportName
    differs: tuple[str, ...] = ()
    """Those of model, recipe, method, threads and device that differ."""
    latency: LatencyComparison | None = None
    operators: OperatorChanges | None = None
    size: SizeComparison | None = None
    memory: MemoryComparison | None = None
    accuracy: tuple[AccuracyComparison, ...] = ()
    delegation: Mapping[str, DelegationComparison] | None = None
    """By method."""
    changes: tuple[Difference, ...] = ()
    generation: GenerationComparison | None = None
    """None unless both sides generated text at a common prompt length and depth, or have the accuracy of their logits."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Unpaired(JsonObject):
    """A report without a counterpart."""

    side: str = ""
    """BASE or CANDIDATE."""
    report: ReportName


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(JsonObject):
    """A candidate compared with a base: the document etfarm.comparison/1."""

    schema: str = SCHEMA
    """The schema of the document."""
    base: ComparedSide
    candidate: ComparedSide
    pairs: tuple[Pair, ...] = ()
    unpaired: tuple[Unpaired, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences that are needed to interpret the rest."""
    gate: GateResult | None = None
    """None if no gate was set."""
    error: ErrorFacts | None = None

    def __repr__(self) -> str:
        return f"Comparison({len(self.pairs)} pairs, passed={self.passed})"

    @property
    def passed(self) -> bool:
        """Whether the gate passed; True if no gate was set."""
        return self.gate is None or self.gate.passed
