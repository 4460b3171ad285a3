"""Bilinear resizes that XNNPACK would compute with another scale than the model. Stdlib only.

`F.interpolate(x, scale_factor=1.5)` takes an output's position by the scale as given, here 1 / 1.5. XNNPACK's resize takes the
quotient of the sizes, which is another one where `size * scale` is no integer: 15 / 22 for 15 rows that become 22.
"""

from __future__ import annotations

import math
from typing import Any, Final

from etfarm.server.compile.program.descriptions import describe_node, list_first

REASON: Final = "XNNPACK's resize takes its scale from the sizes, and the model has another scale_factor"


def has_own_scale(node: Any) -> bool:
    """Return whether a node resizes with a scale that is not the quotient of its sizes."""
    if not str(getattr(node.target, "_name", "") or getattr(node.target, "name", str)()).endswith("upsample_bilinear2d.vec"):
        return False
    _, _, align_corners, scales = (*node.args, None)[:4]
    shape = node.meta["val"].shape
    # Corners that are aligned determine the scale; XNNPACK takes static sizes only.
    if align_corners or not scales or not all(isinstance(size, int) for size in shape):
        return False
    sizes = zip(node.args[0].meta["val"].shape[-2:], shape[-2:], scales, strict=True)
    return any(not math.isclose(size * scale, new, rel_tol=1e-6) for size, new, scale in sizes)


def describe_undelegated(program: Any) -> str:
    """Return which resizes of an exported program XNNPACK is not given, and what to do; empty without any."""
    shown = list_first(describe_node(node) for node in program.graph.nodes if has_own_scale(node))
    if not shown:
        return ""
    return (
        f"XNNPACK does not compute {shown}: it would take the scale from the sizes, which is not the "
        "scale_factor. The portable kernels compute it, slower. For XNNPACK, add recompute_scale_factor=True: the model then "
        "takes the scale from the sizes too, which changes its outputs."
    )
