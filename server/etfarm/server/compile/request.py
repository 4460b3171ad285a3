"""What the daemon asks a compiling child for. Pickled to the child; both ends import it, so it is stdlib only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CompileRequest:
    """One model to compile, or one ready program to describe."""

    model: Path | None
    """The .pt2 that was screened already; its file name may be any. None where `pte` is given."""
    pte: Path | None
    """A ready .pte to describe; nothing is compiled then."""
    model_name: str
    """Stands for the file in messages, so that no path of the server is told."""
    recipe_json: str = ""
    """`etfarm.wire.recipes.Recipe.json`; empty where `pte` is given."""
    calibration: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """Tensor files by method, one a sample, leaves in flattened order; used beside the example inputs that its .pt2
    carries."""
    strict: bool = False
    """torch.export's strict mode where the server exports again, after quantizing."""
    want_etrecord: bool = True
    """Whether to write an ETRecord, which takes about twice the weights' size."""
    stop_after: str | None = None
    """Name of the last stage to run; None for all."""
    threads: int = 1
    """torch's intra-op threads."""
    method: str = "forward"
    """The method that `model` becomes."""


@dataclass(frozen=True)
class ReferenceRequest:
    """A .pt2 to run in eager PyTorch on given inputs."""

    model: Path
    inputs: Sequence[Path]
    """Tensor files, one a sample, leaves in flattened order."""
    model_name: str
    threads: int = 1
