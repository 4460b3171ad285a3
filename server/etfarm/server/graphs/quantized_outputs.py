"""Outputs of programs that are far from their own quantized graph, although each operator alone is not. For children.

XNNPACK computes operators of a delegate together. With static quantization this may change results: a layer that is used twice
gets the scales of its first use, and an activation that is fused with the layer before it skips the quantization between them.
With dynamic scales, it has a scale per row where the graph has one per tensor, so that it may be nearer to the model than the
graph is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.graphs.rounding import run_rounded
from etfarm.server.graphs.sources import source_of
from etfarm.wire import tensors
from etfarm.wire.sqnr import EXACT_DB, decibels, has_same_infinity, sqnr_db
from etfarm.wire.tensors import Scalar, Value

if TYPE_CHECKING:
    from torch.export import ExportedProgram

LEAST_DB: Final = 25.0
"""Minimum SQNR in dB of a quantized program against its own quantized graph."""

_LEAST_EQUAL_DB: Final = 10.0
"""The same of integers, as `Level.db` has them: nine of ten are equal."""

_BEYOND_ROUNDING_DB: Final = 3.0
"""How much lower it must be than that of the graph itself with values that are rounded to neighbours."""

_DRAWS: Final = 4
"""Maximum number of runs with rounded values, of which the one that is farthest off counts: they differ by a few dB."""

_XNNPACK: Final = "XnnpackBackend"

QUANTIZING: Final = ("quantized_decomposed.", "torchao.quantize_affine", "torchao.dequantize_affine",
                     "torchao.choose_qparams", "quant.dequantize_codebook")  # fmt: skip
"""Beginnings of the names of operators that quantize or dequantize."""

_CHOOSING: Final = ("quantized_decomposed.choose_qparams", "torchao.choose_qparams")

_OTHERWISE: Final = (
    "Keep layers in fp32 with skip_modules or skip_operators in a recipe file, or use an int8 recipe with dynamic scales."
)
KEEP_IN_FP32: Final = "Keep layers in fp32 with skip_modules in a recipe file: --numerics names the operators that differ."
QUANTIZE_OTHERWISE: Final = (
    "The model came quantized: export it with other quantization, with layers left in fp32 (torchao's quantize_ takes "
    "filter_fn), or in fp32 for a recipe that quantizes. --numerics names the operators that differ."
)

_NAMED: Final = 3
"""Maximum number of layers or outputs in a message."""


@dataclass(frozen=True)
class Level:
    """How near an output is to that of the quantized graph."""

    db: float
    """The SQNR in dB; -inf for NaN or infinity on one side only. Of integers, the noise are those that differ."""
    equal_share: float | None = None
    """The fraction of equal elements of integers and bools; None for floats."""

    @property
    def is_far(self) -> bool:
        """Whether the output is farther off than usual."""
        return self.db < (LEAST_DB if self.equal_share is None else _LEAST_EQUAL_DB)

    @property
    def words(self) -> str:
        """The level for messages."""
        if self.equal_share is not None:
            return f"{self.equal_share:.0%} of its integers equal"
        return decibels(self.db) if math.isfinite(self.db) else "NaN or infinity on one side only"


def level_of(pairs: Sequence[tuple[Value, Value]]) -> Level | None:
    """Return the level of an output over samples, each a pair of what the graph gives and what the program gave.

    None if it is undefined: other shapes, None on a side, or a graph that gives only zeros, or what both mask.
    """
    arrays = [(_array(expected), _array(actual)) for expected, actual in pairs]
    if any(expected is None or actual is None or expected.shape != actual.shape for expected, actual in arrays):
        return None
    wanted, got = (np.concatenate([array.ravel() for array in side if array is not None]) for side in zip(*arrays, strict=True))
    if not wanted.size:
        return None
    if wanted.dtype.kind in "biu":
        share = float((wanted == got).mean())
        return Level(EXACT_DB if share == 1 else -10 * math.log10(1 - share), share)
    r, a = wanted.astype(np.float64), got.astype(np.float64)
    if (~(np.isfinite(r) & np.isfinite(a)) & ~has_same_infinity(r, a)).any():
        return Level(-math.inf)
    level_db = sqnr_db(r, a)
    return None if level_db is None else Level(level_db)


def is_quantized(program: Any) -> bool:
    """Return whether a graph has quantize or dequantize operators."""
    return any(str(node.target).startswith(QUANTIZING) for node in program.graph.nodes if node.op == "call_function")


def is_static(program: Any) -> bool:
    """Return whether a graph quantizes activations with scales from calibration."""
    return any(str(node.target).startswith("quantized_decomposed.quantize_per_tensor.default") for node in program.graph.nodes)


def is_dynamic(program: Any) -> bool:
    """Return whether a graph quantizes activations with scales of their own values."""
    return any(str(node.target).startswith(_CHOOSING) for node in program.graph.nodes)


def describe(
    program: ExportedProgram,
    names: Sequence[str],
    samples: Sequence[Sequence[tuple[Value, Value]]],
    inputs_of: Callable[[int], Sequence[Any]],
    backends: Collection[str],
    model: Sequence[Value] = (),
    *,
    is_source: bool = False,
) -> str:
    """Return the warning of outputs that are far from a quantized program's graph; empty without such outputs.

    Deep transformers amplify rounding, so that correct kernels may lead far from the graph. Where the graph shows no other cause,
    what rounding explains is no reason to warn.

    Args:
        program: the program as it was lowered.
        names: the names of its outputs.
        samples: for each sample, the outputs of the program in PyTorch with those of the backend.
        inputs_of: returns a sample's flattened inputs as torch's values by its index.
        backends: ids of the backends that compute it.
        model: the outputs before quantization of the first sample. Outputs with dynamic scales are far only if they are farther
            from these than the graph is; without them, they are not judged.
        is_source: whether the user has quantized the program, which is then the model itself.
    """
    dynamic = not is_static(program)
    if dynamic and not (is_dynamic(program) and (is_source or len(model) == len(names))):
        return ""
    levels = {at: level for at in range(len(names)) if (level := level_of([sample[at] for sample in samples])) is not None}
    nearer = dynamic and not is_source
    far = {at: level for at, level in levels.items() if level.is_far and not (nearer and _is_as_near(model[at], *samples[0][at]))}
    advice = advise(program.graph) if far and _XNNPACK in backends else ""
    # Integers are often indices of what is nearly equal, so that a cause in the graph is no reason to blame it for them.
    unsure = [at for at, level in far.items() if math.isfinite(level.db) and (not advice or level.equal_share is not None)]
    explained = _explained_by_rounding(program, {at: far[at] for at in unsure}, samples, inputs_of) if unsure else set()
    listed = [f"{names[at]} ({level.words})" for at, level in far.items() if at not in explained]
    if not listed:
        return ""
    remedy = QUANTIZE_OTHERWISE if is_source else advice or (KEEP_IN_FP32 if dynamic else _OTHERWISE)
    return (
        f"Outputs are far from the program's own quantized graph, run by PyTorch: {_list(listed)}, where {LEAST_DB:g} dB or more "
        f"are usual. The backend computes something else than the graph says. {remedy}"
    )


def _is_as_near(model: Value, graph: Value, actual: Value) -> bool:
    """Return whether a program's output is about as near to that of the model as that of its graph is."""
    of_graph, of_program = level_of([(model, graph)]), level_of([(model, actual)])
    return of_graph is None or of_program is None or of_program.db >= of_graph.db - _BEYOND_ROUNDING_DB


def _explained_by_rounding(
    program: ExportedProgram,
    far: dict[int, Level],
    samples: Sequence[Sequence[tuple[Value, Value]]],
    inputs_of: Callable[[int], Sequence[Any]],
) -> set[int]:
    """Return those of the outputs that are hardly farther from the program than the program with rounded values.

    Samples differ by several dB, so both are compared on one sample: the one that is most like all of them together.
    """
    lowest = min(far, key=lambda at: far[at].db)

    def distance(place: int) -> float:
        level = level_of([samples[place][lowest]])
        return abs(level.db - far[lowest].db) if level is not None else math.inf

    typical = min(range(len(samples)), key=distance)
    leaves = inputs_of(typical)
    levels = {at: level for at in far if (level := level_of([samples[typical][at]])) is not None}
    explained: set[int] = set()
    for seed in range(_DRAWS):
        outputs = run_rounded(program, leaves, seed)
        for at in levels.keys() - explained:
            rounded = level_of([(samples[typical][at][0], _value(outputs[at]))])
            if rounded is not None and levels[at].db >= rounded.db - _BEYOND_ROUNDING_DB:
                explained.add(at)
        if len(explained) == len(far):
            break
    return explained


def advise(graph: Any) -> str:
    """Return what in a graph explains why XNNPACK differs, and what to do about it; empty if nothing does."""
    from etfarm.server.graphs import fusion

    advice = []
    groups = [layers for _, layers in fusion.shared_layers(graph) if any(map(fusion.takes_quantized, layers))]
    shared = [layers[0] for layers in groups]
    if shared:
        advice.append(
            f"XNNPACK quantizes the bias of {_layers(shared)}, used more than once, for the first use only: write "
            "copy_shared_layers = true at the top level of a recipe file."
        )
    # With a copy each, the quantizer finds a shared layer and its activation together.
    copied = {layer for layers in groups for layer in layers}
    if split := [layer for layer in fusion.split_activations(graph) if layer not in copied]:
        advice.append(
            f"XNNPACK fuses {_layers(split)} with the activation after it, and skips the quantization between them: write "
            "fuse_activations = true at the top level of a recipe file."
        )
    return " ".join(advice)


def _layers(nodes: Sequence[Any]) -> str:
    return _list(list(dict.fromkeys(map(_layer, nodes))))


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _layer(node: Any) -> str:
    """Return a node's module, with the user's line if it is known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).removeprefix("L['self']").removeprefix("L__self__").strip(".") if stack else ""
    source = source_of(node.meta.get("stack_trace"))
    return f"{path or node.name} ({source.file}:{source.line})" if source is not None else path or str(node.name)


def _array(value: Value) -> NDArray[np.generic] | None:
    if isinstance(value, Scalar):
        return None if value.value is None else np.asarray(value.value)
    return tensors.to_array(value)


def _value(leaf: Any) -> Value:
    """Return an output of torch; floats as float64, since numpy lacks some of torch's dtypes."""
    if leaf is None or isinstance(leaf, bool | int | float):
        return Scalar("", leaf)
    return tensors.from_array("", (leaf.double() if leaf.is_floating_point() else leaf).numpy())
