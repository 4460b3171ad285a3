"""Step 9: what an analysis is given; pickled by the daemon, so it holds paths and plain values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etfarm.server.reports.latency.interleaved import Block


@dataclass(frozen=True)
class Numerics:
    """The pass that recorded what every operator gave: one iteration of the numerics program on `AnalyzeRequest.inputs`."""

    pte: Path
    """The program that ran: one XNNPACK delegate for each operator, or the timed program itself."""
    etrecord: Path
    """ETRecord of exactly the compilation that made `pte`."""
    etdump: Path
    """Its events, which say where in `debug` each value lies."""
    debug: Path
    """The recorded values, one behind the other."""
    outputs: Path | None
    """Tensor file: the method's outputs in this pass."""
    quantized: Path | None
    """The method's exported program (.pt2) as that compilation lowered it, where a stage quantized. See `reference.load`."""
    is_timed_program: bool
    """Whether `pte` is the program whose times the report has."""


@dataclass(frozen=True)
class AnalyzeRequest:
    """One candidate's result of one method on one device. None stands for what the run did not give."""

    pte: Path | None
    """The program that ran; names its kernels and backends."""
    etdump: Path | None
    """ETDump of the traced pass."""
    etrecord: Path | None
    """ETRecord of exactly the compilation that made `pte`; leads to the user's source lines."""
    model: Path | None
    """The method's exported program (.pt2) before quantization. Loading one executes code: see `reference.load`."""
    inputs: Path | None
    """Tensor file: the flattened leaves of (args, kwargs) that gave `outputs`."""
    outputs: Path | None
    """Tensor file: the flattened outputs of the device."""
    samples: Path | None
    """Timed iterations: int64, little-endian, nanoseconds."""
    method: str
    """The method that ran."""
    output_names: tuple[str, ...]
    """One for each output, in order; may be shorter, the file's own names answer then."""
    traced_ns: tuple[int, ...]
    """How long each traced iteration took by the runner's own clock."""
    blocks: tuple[Block, ...] = ()
    """What `samples` are made of, where programs took turns."""
    base_samples: Path | None = None
    """Those of the program to compare with, and their blocks; None where there is none."""
    base_blocks: tuple[Block, ...] = ()
    quantized: Path | None = None
    """The method exported (.pt2) as `pte`'s compilation lowered it, where a stage quantized. See `reference.load`."""
    limit_s: float = 600.0
    """How long the analysis may take; a child that takes longer is ended, and what it found is gone."""
    screen: Callable[[Path], None] | None = None
    """Looks into each .pt2 before it is loaded, and raises for what may not be; pickled, so a module's function."""
    numerics: Numerics | None = None
    """Set where --numerics was asked for and the pass gave its files."""
