"""`Report`, the result of one cell in the schema etfarm.report/1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from etfarm.client.reports.compilation import Compile
from etfarm.client.reports.enums import Actor, CellState
from etfarm.client.reports.error_facts import ErrorFacts
from etfarm.client.reports.generation import Generation
from etfarm.client.reports.json_object import JsonObject
from etfarm.client.reports.latency import Latency, Load, Measurement, Memory, PairedRatio
from etfarm.client.reports.numerics import Accuracy, NumericGap, Numerics
from etfarm.client.reports.operators import Operators, Profile
from etfarm.client.reports.runs import Run, RunSpread
from etfarm.client.reports.telemetry import Telemetry
from etfarm.client.reports.verdict import Verdict

if TYPE_CHECKING:
    import pandas as pd

    from etfarm.wire.errors import EtfarmError


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SourceFile(JsonObject):
    """A file that a factory imported from below its root."""

    path: str
    """Relative to the root: the folder that has the factory's file or its top package."""
    sha256: str = ""
    """SHA-256 of the bytes that were executed."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModelFacts(JsonObject):
    """The model of a cell."""

    name: str
    digest: str | None = None
    """SHA-256 of the manifest of its exported programs; for a ready program, of the program's manifest."""
    sources: tuple[SourceFile, ...] | None = None
    """The files that its factory imported from below its root, by path; None for a .pt2, a .pte, and whatever has no factory. Of
    more than 1,000 files, the last entry stands for all further ones.
    """


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DeviceFacts(JsonObject):
    """The device of a cell."""

    id: str
    name: str
    arch: str | None = None
    """The architecture, such as `aarch64`."""
    soc: str | None = None
    """The system on a chip."""
    os: str | None = None
    cores: int = 0
    """Number of cores."""
    memory_bytes: int = 0
    """Size of its memory, in bytes."""
    emulated: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Runner(JsonObject):
    """The process that ran the program."""

    kind: str = ""
    """`native`, `python`, or the kind of an installed runner."""
    executorch: str | None = None
    """The version of ExecuTorch."""
    bundle_digest: str | None = None
    """SHA-256 of the farm's runner bundle; None for an installed runner."""
    cores: str | None = None
    """The logical CPUs that the runner was restricted to, such as `0-3`; None if it was not restricted."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Phase(JsonObject):
    """One phase of the cell's timeline."""

    actor: Actor | None = None
    phase: str = ""
    """Name of the phase, such as `COMPILE` or `TIMED`."""
    start_ms: float = 0.0
    """Start in milliseconds, relative to the job's submission; negative before it."""
    duration_ms: float = 0.0
    """Duration in milliseconds, on the actor's own monotonic clock."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Analysis(JsonObject):
    """How the measurement was evaluated."""

    version: str | None = None
    """The server's version."""
    key: str | None = None
    """Digest of all that the result depends on."""
    cached: bool = False
    """Whether an earlier result with the same key was used."""
    at: str | None = None
    """When the result was computed; ISO 8601 in UTC."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InputTensor(JsonObject):
    """One input of a method."""

    name: str | None = None
    dtype: str | None = None
    """The dtype of a tensor; `bool scalar`, `int scalar`, `float scalar` or `None` for a Python value."""
    shape: tuple[int, ...] = ()
    """The sizes of a tensor's dims; empty for a scalar."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Inputs(JsonObject):
    """The inputs of the run."""

    digest: str | None = None
    """SHA-256 of the tensor file; None if the runner generated the inputs."""
    tensors: tuple[InputTensor, ...] | None = None
    """The inputs in flattened order; None if unknown."""
    from_job: bool | None = None
    """Whether the job named them; False for the model's example inputs and for those that the runner generated."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Report(JsonObject):
    """The result of one cell: one model, recipe, method and thread count on one device.

    `latency.p50_ns` is the median latency in nanoseconds, `latency.samples_ns` has each timed iteration, `verdict` says
    whether the latency can be trusted, and `operators` are the rows of the traced pass. Times end in `_ns` or `_ms`, sizes in
    `_bytes`, shares are 0 to 1.

    A part that was not measured is None: `latency` of a failed cell or of a compilation, for instance.
    """

    id: str
    cell: str | None = None
    """The cell's id."""
    attempt: str | None = None
    """The attempt's id; None if the cell was never placed on a device."""
    recipe: str | None = None
    """The recipe as the user named it; None for a ready program."""
    recipe_digest: str | None = None
    """SHA-256 of the recipe."""
    method: str | None = None
    """The method that was measured, such as `forward`."""
    threads: int | None = None
    """Number of threads of the runner."""
    state: CellState
    """SUCCEEDED, FAILED or CANCELLED."""
    error: ErrorFacts | None = None
    """Why the cell failed; None if it did not."""
    model: ModelFacts | None = None
    device: DeviceFacts | None = None
    runner: Runner | None = None
    compile: Compile | None = None
    measurement: Measurement | None = None
    latency: Latency | None = None
    load: Load | None = None
    memory: Memory | None = None
    accuracy: tuple[Accuracy, ...] | None = None
    """Each output, for each reference."""
    profile: Profile | None = None
    operators: Operators | None = None
    """The rows of the traced pass, in the order of execution; None if there was no traced pass."""
    numeric_gap: tuple[NumericGap, ...] | None = None
    """Each operator's output against the host's, in the order of execution; None unless `numerics` was requested."""
    verdict: Verdict | None = None
    telemetry: Telemetry | None = None
    timeline: tuple[Phase, ...] = ()
    interleaved: PairedRatio | None = None
    """Against the first candidate of an interleaved attempt; None in its own report and without interleaving."""
    numerics: Numerics | None = None
    """How `numeric_gap` was computed; None unless `numerics` was requested."""
    analysis: Analysis | None = None
    """How the measurement was evaluated; None if there was nothing to evaluate."""
    inputs: Inputs | None = None
    """The inputs of the run; None if the method did not run."""
    runs: tuple[Run, ...] = ()
    """The processes that measured the program, in order: one, or as many as `repeat`. Empty if nothing was timed, and if the
    attempt was interleaved."""
    run_spread: RunSpread | None = None
    """How much medians of separate runs of this program vary; None if nothing was timed or the spread is unknown."""
    generation: Generation | None = None
    """How a language model generates text; None unless `generate` was requested. `latency` is None then, and `profile` and
    `operators` are those of decode."""

    def __repr__(self) -> str:
        name = self.model.name if self.model else None
        return f"Report({self.id!r}, {name!r}, {self.state})"

    @property
    def failure(self) -> EtfarmError | None:
        """`error` as an exception; None if the cell has no error."""
        return None if self.error is None else self.error.exception()

    def to_pandas(self, table: Literal["operators", "samples", "generation", "tokens"] = "operators") -> pd.DataFrame:
        """Return one table of the report as a pandas DataFrame.

        Each row identifies its report, so that the tables of several reports can be concatenated. `samples` has the columns
        `iteration` and `latency_ns`; `operators` has those of `Operators.to_pandas`; `generation` has a row for each prompt
        length and depth, and `tokens` one for each generated token.

        Raises:
            ValueError: there is no such table.
            EXTRA_MISSING: pandas is not installed.
        """
        from etfarm.client.reports.frames import document_frame

        return document_frame({"job": None, "reports": [self.to_dict()]}, table)

    def _repr_html_(self) -> str:
        from etfarm.client.formats import notebook

        return notebook.report(self.to_dict())
