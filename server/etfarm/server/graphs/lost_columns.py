"""Columns of a quantized output that its quantization step leaves nothing of, since others have far larger values.

A layer that gives pixels up to 600 and offsets below 0.1 has one static scale for all, and a whole output hides what it loses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.graphs.sources import path_of
from etfarm.wire import tensors
from etfarm.wire.sqnr import QUANTIZED_DB, ROUNDING_ERROR, sqnr_db
from etfarm.wire.tensors import Tensor, Value

_FEWEST: Final = 5
"""Minimum number of values of a column."""
_WIDER: Final = 50.0
"""How much wider the range of the widest column is than that of a lost one."""
_MOST: Final = 1 << 24
"""Maximum number of elements of all samples, which take 130 bytes each."""
_NAMED: Final = 8
"""Maximum number of columns in a message."""
_LAYERS: Final = ("linear", "conv1d", "conv2d", "convolution", "addmm", "mm")
_VIEWS: Final = ("view", "reshape", "flatten", "permute", "transpose", "squeeze", "unsqueeze", "contiguous", "clone")
_CALL: Final = re.compile(r"@[0-9]+")
"""The number of a further call of a module in its path."""


def dim_of_columns(program: Any, at: int) -> int | None:
    """Return the dim of an output along which one layer gives its columns; None if no layer gives it directly.

    The others are positions in space or time, which may vary less than others without any loss.

    Args:
        program: the exported program before quantization.
        at: the output's index.
    """
    node = _node_of(program, at)
    while _name(node) in ("clone", "contiguous"):
        node = node.args[0]
    kind = _name(node)
    return None if kind not in _LAYERS else 1 if kind.startswith("conv") else -1


def find(pairs: Sequence[tuple[Value, Value]], dim: int | None) -> list[int]:
    """Return the columns of an output, along a dim, that are lost over all samples; none without a dim.

    Such a column varies in the model by less than the output's step, and the widest one by far more. The step is the least
    distance between values of the program. Probabilities do not count: those of classes that never occur are all near 0.

    Args:
        pairs: for each sample, the output of the model and that of the program.
    """
    if not all(isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape for one, other in pairs):
        return []
    sides = [[tensors.to_array(value) for value in side] for side in zip(*pairs, strict=True)]
    if dim is None or any(array.ndim < 2 for array in sides[0]) or sum(array.size for array in sides[0]) > _MOST:
        return []
    if len({array.shape[dim] for array in sides[0]}) != 1 or sides[0][0].dtype.kind in "biu":
        return []
    wanted, got = (np.concatenate([_columns(array, dim) for array in side]).astype(np.float64) for side in sides)
    if len(wanted) < _FEWEST or not (np.isfinite(wanted).all() and np.isfinite(got).all()):
        return []
    if wanted.min() >= 0 and wanted.max() <= 1:
        return []
    widths = np.ptp(wanted, axis=0)
    narrow = (widths < widths.max() / _WIDER) & (widths > ROUNDING_ERROR)
    if not narrow.any():
        return []
    narrow &= widths < np.diff(np.unique(got)).min(initial=np.inf)
    return [int(at) for at in np.flatnonzero(narrow) if _is_lost(wanted[:, at], got[:, at])]


def describe(method: str, name: str, columns: Sequence[int], program: Any, at: int) -> str:
    """Return the warning of lost columns.

    Args:
        name: the output's name.
        program: the exported program before quantization.
        at: the output's index.
    """
    more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
    shown = ", ".join(map(str, columns[:_NAMED]))
    return (
        f"{method} loses columns {shown}{more} of {name}, which is near the model as a whole: they vary by less than the "
        "output's quantization step, which follows far larger columns. Return columns of such different ranges as outputs "
        f"of their own, by layers of their own{_advise(program, at)}."
    )


def _columns(array: NDArray[Any], dim: int) -> NDArray[Any]:
    """Return an array with a row for each element of the other dims."""
    last = np.moveaxis(array, dim, -1)
    return last.reshape(-1, last.shape[-1])


def _is_lost(wanted: NDArray[np.float64], got: NDArray[np.float64]) -> bool:
    level = sqnr_db(wanted, got, wanted - wanted.mean())
    return level is not None and level < QUANTIZED_DB and bool((np.abs(wanted - got) > ROUNDING_ERROR).any())


def _advise(program: Any, at: int) -> str:
    """Return how to keep the layer that gives an output in fp32; empty if that is unknown."""
    node = _node_of(program, at)
    while _name(node) in _VIEWS:
        node = node.args[0]
    module = _module(node) if _name(node) in _LAYERS else ""
    return f'; or keep that layer in fp32: skip_modules = ["{module}"] in a recipe file' if module else ""


def _node_of(program: Any, at: int) -> Any:
    """Return the node of an output; None if there is none."""
    specs = program.graph_signature.output_specs
    returned = next(node.args[0] for node in program.graph.nodes if node.op == "output")
    outputs = [value for spec, value in zip(specs, returned, strict=False) if spec.kind.name == "USER_OUTPUT"]
    return outputs[at] if at < len(outputs) else None


def _name(node: Any) -> str:
    return str(getattr(node, "target", "")).removeprefix("aten.").partition(".")[0]


def _module(node: Any) -> str:
    for key, entry in reversed((node.meta.get("nn_module_stack") or {}).items()):
        if not key.startswith("_empty_nn_module_stack"):
            return _CALL.sub("", path_of(entry[0] if isinstance(entry, tuple) else entry) or "")
    return ""
