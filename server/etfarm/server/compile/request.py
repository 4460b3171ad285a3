"""What the daemon asks compiling children for. Pickled to the child; both ends import it, so it is stdlib only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etfarm.server.compile.screening.operators import Operators


@dataclass(frozen=True)
class QuantizeRequest:
    """A model to quantize: the stages QUANTIZE and the TORCH_EXPORT that follows it."""

    models: Mapping[str, Path]
    """A screened .pt2 by method; the files' names may be any."""
    model_name: str
    """Stands for the files in messages, so that no path of the server is told."""
    recipe_json: str
    """`etfarm.wire.recipes.Recipe.json`."""
    calibration: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """Tensor files by method, one a sample, leaves in flattened order; used beside the example inputs that its .pt2
    carries. Read one after the other, so there may be many."""
    threads: int = 1
    """torch's intra-op threads."""
    operators: Operators = field(default_factory=Operators)
    """That the models may use."""


@dataclass(frozen=True)
class LowerRequest:
    """Exported programs to lower to a .pte."""

    models: Mapping[str, Path]
    """What is lowered, by method: a screened .pt2, or what a quantizing child made."""
    originals: Mapping[str, Path]
    """The .pt2s before any quantization, the client's included, by method: what outputs are compared with. The same files
    where nothing was quantized."""
    model_name: str
    recipe_json: str
    quantized_here: bool = False
    """Whether a quantizing child made `models`, which has told then what it left in fp32."""
    constant_methods: Mapping[str, Path] = field(default_factory=dict)
    """Tensor files of flattened leaves."""
    stop_after: str | None = None
    """Name of the last stage to run; None for all of the recipe's."""
    want_etrecord: bool = True
    """Whether to write an ETRecord, which takes about twice the weights' size."""
    threads: int = 1
    operators: Operators = field(default_factory=Operators)
    """That the models may use."""


@dataclass(frozen=True)
class InspectRequest:
    """A ready program to describe."""

    pte: Path
    model_name: str
    threads: int = 1
