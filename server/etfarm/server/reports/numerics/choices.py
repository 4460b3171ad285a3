"""Step 9, in the jailed child: operators that give places of elements, judged by the elements.

Equal elements may be told at any of their places, and what quantization rounds makes many equal. So it is not the places that are
compared, but what is at them.
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
    """Whether an operator is one of those."""
    return base_name(op_type) in CHOOSING


def chosen(node: Node, args: Sequence[Any], kwargs: dict[str, Any], places: Array) -> Array | None:
    """The elements of a node's first argument that its places name; None where that is not known of this operator.

    Args:
        places: as the node gives them, along its `dim`, or of the flattened argument where it has none.

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
    found: Array = np.take_along_axis(of, places.astype(np.int64), dim)
    return found
