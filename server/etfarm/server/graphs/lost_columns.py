"""Columns of a quantized output that its quantization step leaves nothing of, since others have far larger values.

A layer that gives pixels up to 600 and offsets below 0.1 has one static scale for all, and a whole output hides what it loses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from etfarm.server.graphs.sources import path_of
from etfarm.server.graphs.views import UnknownSize, is_view, move, name_of, shape_of
from etfarm.wire import tensors
from etfarm.wire.sqnr import QUANTIZED_DB, ROUNDING_ERROR, sqnr_db
from etfarm.wire.tensors import Tensor, Value

Array = NDArray[Any]

_FEWEST: Final = 5
"""Minimum number of values of a column."""
_WIDER: Final = 50.0
"""How much wider the range of the widest column is than that of a lost one."""
_MOST: Final = 1 << 24
"""Maximum number of elements of all samples, which take up to 24 bytes each."""
_FOR_STEP: Final = 1 << 16
"""Number of elements, chosen at random, among which there are neighbours of a quantized output's 256 values."""
_NAMED: Final = 8
"""Maximum number of columns in a message."""
_CONVOLUTIONS: Final = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
_LAYERS: Final = (*_CONVOLUTIONS, "linear", "addmm", "mm")
_CALL: Final = re.compile(r"@[0-9]+")
"""The number of a further call of a module in its path."""


def columns_of(program: Any, at: int) -> Array | None:
    """Return the column of each element of an output that one layer gives, also through views; None if no layer does.

    Columns are a layer's features or channels. Positions in space or time are none: they may vary less than others without any
    loss. Dims along which the columns are the same have size 1.

    Args:
        program: the exported program before quantization.
        at: the output's index.
    """
    views, layer = _trace(program, at)
    try:
        if layer is None or math.prod(shape_of(layer)) > _MOST:
            return None
        numbers = _columns_of_layer(layer)
        for view in views:
            numbers = move(view, numbers)
    except UnknownSize:
        return None
    columns: Array = numbers.numpy()
    for dim in range(columns.ndim):
        first = columns.take([0], dim) if columns.size else columns
        columns = first if (columns == first).all() else columns
    return columns


def find(pairs: Sequence[tuple[Value, Value]], columns: Array | None) -> list[int]:
    """Return the columns of an output that are lost over all samples; none without columns.

    Such a column varies in the model by less than the output's step, and the widest one by far more. The step is the least
    distance between values of the program. Probabilities do not count: those of classes that never occur are all near 0.

    Args:
        pairs: for each sample, the output of the model and that of the program.
        columns: as `columns_of` returns them.
    """
    if columns is None or columns.size < 2 or not all(map(_is_comparable, pairs)):
        return []
    sides = [[tensors.to_array(value) for value in side] for side in zip(*pairs, strict=True)]
    if sum(array.size for array in sides[0]) > _MOST or not all(_fits(array, columns) for array in sides[0]):
        return []
    wanted, got = ([_rows(array, columns) for array in side] for side in sides)
    if not all(np.isfinite(rows).all() for rows in (*wanted, *got)):
        return []
    numbers = columns.ravel()
    lowest, highest = np.full(numbers.max() + 1, np.inf), np.full(numbers.max() + 1, -np.inf)
    for rows in wanted:
        np.minimum.at(lowest, numbers, rows.min(axis=0).astype(np.float64))
        np.maximum.at(highest, numbers, rows.max(axis=0).astype(np.float64))
    if lowest.min() >= 0 and highest.max() <= 1:
        return []
    widths = highest - lowest
    narrow = (widths < widths.max() / _WIDER) & (widths > ROUNDING_ERROR)
    narrow &= np.bincount(numbers) * sum(map(len, wanted)) >= _FEWEST
    if narrow.any():
        narrow &= widths < _step(got)
    return [
        int(column) for column in np.flatnonzero(narrow) if _is_lost(*(_pick(side, numbers == column) for side in (wanted, got)))
    ]


def describe(method: str, name: str, columns: Sequence[int], program: Any, at: int) -> str:
    """Return the warning of lost columns.

    Args:
        name: the output's name.
        program: the exported program before quantization.
        at: the output's index.
    """
    views, layer = _trace(program, at)
    more = f" and {len(columns) - _NAMED} more" if len(columns) > _NAMED else ""
    shown = ", ".join(map(str, columns[:_NAMED]))
    module = "" if layer is None else _module(layer)
    of_layer = f" (numbered as {module or 'its layer'} gives them)" if views else ""
    otherwise = f'; or keep that layer in fp32: skip_modules = ["{module}"] in a recipe file' if module else ""
    return (
        f"{method} loses columns {shown}{more} of {name}{of_layer}, which is near the model as a whole: they vary by less than "
        "the output's quantization step, which follows far larger columns. Return columns of such different ranges as outputs "
        f"of their own, by layers of their own{otherwise}."
    )


def _trace(program: Any, at: int) -> tuple[list[Any], Any]:
    """Return the views that give an output, in order, and the layer before them; None for the layer if there is none."""
    views: list[Any] = []
    node = _node_of(program, at)
    while is_view(node):
        views.insert(0, node)
        node = node.args[0]
    return views, node if name_of(node) in _LAYERS else None


def _columns_of_layer(layer: Any) -> Any:
    """Return a tensor of the shape of a layer's output with the column of each element."""
    import torch

    shape = shape_of(layer)
    dim = -1
    if name_of(layer) in _CONVOLUTIONS:  # before its dims of space; an unbatched one has no other dim
        dim = 1 - layer.args[1].meta["val"].dim()
    numbers = torch.arange(shape[dim], dtype=torch.int32)
    return numbers.reshape([-1, *[1] * (-1 - dim)]).expand(shape)


def _is_comparable(pair: tuple[Value, Value]) -> bool:
    wanted, got = pair
    return isinstance(wanted, Tensor) and isinstance(got, Tensor) and wanted.shape == got.shape


def _fits(array: Array, columns: Array) -> bool:
    same = all(size in (1, other) for size, other in zip(columns.shape, array.shape, strict=False))
    return array.ndim == columns.ndim and same and array.size > 0 and array.dtype.kind not in "biu"


def _rows(array: Array, columns: Array) -> Array:
    """Return an array with a column for each element of `columns`, and a row for each element of the other dims."""
    along = [dim for dim, size in enumerate(columns.shape) if size > 1]
    return np.moveaxis(array, along, range(-len(along), 0)).reshape(-1, columns.size)


def _step(got: Sequence[Array]) -> float:
    """Return the least distance between two values."""
    values = np.concatenate([rows.ravel() for rows in got])
    if len(values) > _FOR_STEP:
        values = values[np.random.default_rng(0).integers(len(values), size=_FOR_STEP)]
    return float(np.diff(np.unique(values.astype(np.float64))).min(initial=np.inf))


def _pick(side: Sequence[Array], of_column: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.concatenate([rows[:, of_column].ravel() for rows in side]).astype(np.float64)


def _is_lost(wanted: NDArray[np.float64], got: NDArray[np.float64]) -> bool:
    level = sqnr_db(wanted, got, wanted - wanted.mean())
    return level is not None and level < QUANTIZED_DB and bool((np.abs(wanted - got) > ROUNDING_ERROR).any())


def _node_of(program: Any, at: int) -> Any:
    """Return the node of an output; None if there is none."""
    specs = program.graph_signature.output_specs
    returned = next(node.args[0] for node in program.graph.nodes if node.op == "output")
    outputs = [value for spec, value in zip(specs, returned, strict=True) if spec.kind.name == "USER_OUTPUT"]
    return outputs[at] if at < len(outputs) else None


def _module(node: Any) -> str:
    for key, entry in reversed((node.meta.get("nn_module_stack") or {}).items()):
        if not key.startswith("_empty_nn_module_stack"):
            return _CALL.sub("", path_of(entry[0] if isinstance(entry, tuple) else entry) or "")
    return ""
