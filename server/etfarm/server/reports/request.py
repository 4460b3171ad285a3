"""Step 9: what an analysis is given; pickled by the daemon, so it holds paths and plain values only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    """The method's exported program (.pt2) before quantization. Screened by the caller: loading one executes code."""
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
