"""Operators that return indices of elements, which are judged by the elements.

Of equal elements an operator may return any index, and quantization makes many elements equal. So the comparison is between the
elements, not between their indices.
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
    """Return the elements of a node's first argument at its indices; None if the operator's layout is not known.

    Args:
        places: the node's indices along its `dim`, or of the flattened argument if it has none.

    Raises:
        IndexError: there is no such element.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None or base_name(str(node.target)) not in CHOOSING - {"max_pool2d_with_indices"}:
        return None
    bound = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    bound |= dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
    of, dim = args[0].detach().double().numpy(), bound.get("dim")
    if dim is None:
        of, dim, places = of.ravel(), 0, places.reshape(-1)
    elif places.ndim < of.ndim:
        places = np.expand_dims(places, dim)
    if places.ndim != of.ndim or not of.size:
        return None
    if places.size and (places.min() < 0 or places.max() >= of.shape[dim]):
        raise IndexError(f"there are {of.shape[dim]} elements")
    elements: Array = np.take_along_axis(of, places.astype(np.int64), dim)
    return elements
