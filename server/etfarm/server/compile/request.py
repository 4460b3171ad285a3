"""Requests from the daemon to compiling children. They are pickled, and both ends import this: standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etfarm.server.compile.screening.operators import Operators


@dataclass(frozen=True)
class QuantizeRequest:
    """A model to quantize: the stages QUANTIZE and the TORCH_EXPORT that follows it."""

    models: Mapping[str, Path]
    """Screened .pt2 files by method; file names have no meaning."""
    model_name: str
    """Name of the model in messages, which must not contain paths of the server."""
    recipe_json: str
    """`etfarm.wire.recipes.Recipe.json`."""
    calibration: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """Tensor files by method, one for each sample, leaves in flattened order; used in addition to the .pt2's example inputs.
    Children read them one after another, so there may be many."""
    threads: int = 1
    """Number of torch's intra-op threads."""
    operators: Operators = field(default_factory=Operators)
    """Operators that the models may use."""


@dataclass(frozen=True)
class LowerRequest:
    """Exported programs to lower to a .pte."""

    models: Mapping[str, Path]
    """Programs to lower by method: screened .pt2 files, or the result of a quantizing child."""
    originals: Mapping[str, Path]
    """Unquantized .pt2 files by method, which outputs are compared with. The same files as `models` if nothing, on the client
    included, was quantized."""
    model_name: str
    recipe_json: str
    quantized_here: bool = False
    """Whether a quantizing child produced `models`; that child has already reported the layers that stayed in fp32."""
    constant_methods: Mapping[str, Path] = field(default_factory=dict)
    """Tensor files with flattened leaves, by constant method."""
    calls: Sequence[tuple[str, Path | None]] = ()
    """Calls by which the program is compared with the model, one after the other: a method with a tensor file of its inputs, None
    for the example inputs."""
    stop_after: str | None = None
    """Name of the last stage to run; None for all stages of the recipe."""
    want_etrecord: bool = True
    """Whether to write an ETRecord, which takes about the weights' size."""
    threads: int = 1
    operators: Operators = field(default_factory=Operators)
    """Operators that the models may use."""


@dataclass(frozen=True)
class InspectRequest:
    """An uploaded program to describe."""

    pte: Path
    model_name: str
    threads: int = 1


@dataclass(frozen=True)
class UploadRequest:
    """An uploaded .pt2 or .pte to screen or describe."""

    file: Path
    is_program: bool | None = None
    """Whether it must be a .pte rather than a .pt2; None to decide by the first bytes."""
    operators: Operators = field(default_factory=Operators)
    """Operators that the model may use."""
