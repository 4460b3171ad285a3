"""Arithmetic of integers with numbers, which XNNPACK's quantizer would turn into arithmetic of floats.

Before calibration, ExecuTorch's XNNPACKQuantizer replaces the 1 in `positions + 1` by a float tensor, whatever the dtype of
`positions`. The sum is then a float, and an embedding or an index that takes it fails. Operators in their `.Scalar` form are not
replaced, and lower to the same kernels. Differences are not replaced in either form.

Source: `_convert_scalars_to_attrs` of executorch/backends/xnnpack/quantizer/xnnpack_quantizer_utils.py 1.5.1.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from etfarm.server.compile.lower.annotations import Reviewed
from etfarm.server.compile.lower.selection import ANNOTATION

_SCALAR_FORMS: Final = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add.Scalar,
    torch.ops.aten.mul.Tensor: torch.ops.aten.mul.Scalar,
}


class IntegersKept(Reviewed):
    """A quantizer that leaves operators of integers alone: those with integers among observed inputs, or as their output."""

    def review(self, model: torch.fx.GraphModule) -> None:
        """Drop the annotations of operators of integers."""
        for node in model.graph.nodes:
            if (annotation := node.meta.get(ANNOTATION)) is not None and any(
                map(_is_integer, (node, *annotation.input_qspec_map))
            ):
                del node.meta[ANNOTATION]


def find_scalar_arithmetic(module: Any) -> list[Any]:
    """Return the nodes of a graph module, or of an exported program, that add or multiply integers and a number."""
    return [node for node in module.graph.nodes if node.op == "call_function" and _is_scalar_arithmetic(node)]


def keep_integers(module: torch.fx.GraphModule) -> None:
    """Give the nodes of `find_scalar_arithmetic` their `.Scalar` form, which quantizers leave alone."""
    for node in find_scalar_arithmetic(module):
        node.target = _SCALAR_FORMS[node.target]
    module.recompile()


def _is_integer(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_scalar_arithmetic(node: Any) -> bool:
    value = node.meta.get("val")
    if node.target not in _SCALAR_FORMS or not isinstance(value, torch.Tensor) or len(node.args) < 2:
        return False
    return not (value.is_floating_point() or value.is_complex()) and isinstance(node.args[1], bool | int | float)
