"""The request for an analysis. The server pickles it, so it holds only paths and plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from etfarm.server.reports.latency.generation import Generation
from etfarm.server.reports.latency.interleaved import Block

TRACE_TIMES: Final = "trace_times.i64"
"""Name of the file that an analysis writes to its folder, with the times that become Report.trace_times."""
PREFILL_TRACE_TIMES: Final = "prefill_trace_times.i64"
"""The same for Generation.prefill_trace_times."""


@dataclass(frozen=True)
class Numerics:
    """The files of the pass that recorded every operator's outputs in one iteration on `AnalyzeRequest.inputs`."""

    pte: Path
    """The program that ran: one XNNPACK delegate for each operator, or the timed program itself."""
    etrecord: Path
    """ETRecord of the same compilation as `pte`."""
    etdump: Path
    """ETDump of the pass, with the position of each value in `debug`."""
    debug: Path
    """The recorded values, one after the other."""
    outputs: Path | None
    """Tensor file: the method's outputs in this pass."""
    quantized: Path | None
    """The method's exported program (.pt2) as that compilation lowered it, if a stage quantized it. See `reference.load`."""
    is_timed_program: bool
    """Whether `pte` is the program that was timed."""


@dataclass(frozen=True)
class Trace:
    """A traced pass beside that of the request's own method."""

    etdump: Path | None
    traced_ns: tuple[int, ...]
    method: str


@dataclass(frozen=True)
class AnalyzeRequest:
    """One candidate's result for one method on one device. None stands for files that the run did not produce."""

    pte: Path | None
    """The program that ran, with the names of its kernels and backends."""
    etdump: Path | None
    """ETDump of the traced pass."""
    etrecord: Path | None
    """ETRecord of the same compilation as `pte`, with the user's source lines."""
    model: Path | None
    """The method's exported program (.pt2) before quantization. Loading it executes code: see `reference.load`."""
    inputs: Path | None
    """Tensor file: the flattened leaves of (args, kwargs) that produced `outputs`."""
    outputs: Path | None
    """Tensor file: the flattened outputs of the device."""
    samples: Path | None
    """Timed iterations: int64, little-endian, nanoseconds."""
    method: str
    """The method that ran."""
    output_names: tuple[str, ...]
    """The names of the outputs in order; missing ones are taken from the file."""
    traced_ns: tuple[int, ...]
    """Time of each traced iteration by the runner's own clock, ns."""
    runs: tuple[int, ...] = ()
    """Number of samples of each run, in order; empty for a single one."""
    blocks: tuple[Block, ...] = ()
    """The blocks that make up `samples` of interleaved programs."""
    base_samples: Path | None = None
    """The samples of the program to compare with; None if there is none."""
    base_blocks: tuple[Block, ...] = ()
    quantized: Path | None = None
    """The method exported (.pt2) as `pte`'s compilation lowered it, if a stage quantized it. See `reference.load`."""
    limit_s: float = 600.0
    """Time limit of the analysis; a child that takes longer is killed, and its results are lost."""
    screen: Callable[[Path], None] | None = None
    """A function that raises for a .pt2 that must not be loaded; module-level, since it is pickled."""
    numerics: Numerics | None = None
    """Set if --numerics was requested and the pass wrote its files."""
    generation: Generation | None = None
    """Set if the generation of text was measured; `method` and `etdump` are then those of decode."""
    prefill: Trace | None = None
    """The traced pass of the method that processes prompts; None if it was not traced."""

    @property
    def needs_torch(self) -> bool:
        """Whether the analysis runs a graph on the host."""
        return any(part is not None for part in (self.model, self.quantized, self.numerics))
