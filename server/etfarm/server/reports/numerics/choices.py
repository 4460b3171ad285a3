"""Operators that return indices of elements, and are judged by the selected elements.

Among equal elements an operator may return any index, and quantization makes many elements equal. The selected elements are
therefore compared instead of their indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from etfarm.server.reports.numerics.deviation import Array
from etfarm.server.reports.trace.graph import base_name

if TYPE_CHECKING:
    from torch.fx import Node

CHOOSING: Final = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "max_pool2d_with_indices"})


def chooses(op_type: str) -> bool:
    """Return whether an operator returns indices of elements."""
    return base_name(op_type) in CHOOSING


def chosen(node: Node, args: Sequence[Any], kwargs: dict[str, Any], places: Array) -> Array | None:
    """Return the elements of a node's first argument at its indices; None if the operator's layout is unknown.

    Args:
        places: the node's indices along its `dim`, or into the flattened argument if it has no `dim`.

    Raises:
        IndexError: an index is out of range.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or base_name(str(node.target)) not in CHOOSING - {"max_pool2d_with_indices"}:
        return None
    bound = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}
    bound |= dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    source, dim = args[0].detach().double().numpy(), bound.get("dim")
    if dim is None:
        source, dim, places = source.ravel(), 0, places.reshape(-1)
    elif places.ndim < source.ndim:
        places = np.expand_dims(places, dim)
    if places.ndim != source.ndim or not source.size:
        return None
    if places.size and (places.min() < 0 or places.max() >= source.shape[dim]):
        raise IndexError(f"there are {source.shape[dim]} elements")
    elements: Array = np.take_along_axis(source, places.astype(np.int64), dim)
    return elements
