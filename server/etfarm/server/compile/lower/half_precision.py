"""Quantization of models in half precision, some of which XNNPACK computes wrongly or not at all.

With ExecuTorch 1.5, convolutions and pools of statically quantized float16 give garbage or crash, and there are no kernels that
quantize bfloat16: with dynamic scales, the runtime crashes. Linears and elementwise operators of float16 work.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from etfarm.server.compile.errors import StageFailed
from etfarm.server.compile.program.descriptions import describe_node
from etfarm.server.graphs.views import name_of

_IMAGES: Final = re.compile(r"_*(conv|(adaptive_)?(avg|max)_pool|upsample|pixel_|grid_sampler)")
"""Operators that XNNPACK computes in channels last."""


def require_computable(module: Any) -> None:
    """Refuse operators whose activations a graph quantizes in a dtype that does not work.

    Raises:
        StageFailed: an operator takes or gives such activations.
    """
    for node in module.graph.nodes:
        if node.op != "call_function" or str(node.target).startswith("quantized_decomposed."):
            continue
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if dtype == torch.bfloat16:
            refused = {"static", "dynamic"}
        elif dtype == torch.float16 and _IMAGES.match(name_of(node)):
            refused = {"static"}
        else:
            continue
        scales = {_scales_of(each) for each in (*node.all_input_nodes, *node.users)}
        for kind in sorted(scales & refused):
            why = f"{kind} quantization does not work for this operator in {str(dtype)[6:]}: {describe_node(node)}."
            remedy = "Quantize the model in float32, with inputs in float32 too: model.float(), before the export."
            raise StageFailed("QUANTIZE", "HalfPrecision", why, remedy)


def _scales_of(node: Any) -> str:
    """Return whether a node quantizes or dequantizes activations with `static` or `dynamic` scales; empty if it does neither."""
    is_scaled = re.match(r"quantized_decomposed\.(de)?quantize_per_tensor\.(default|tensor)", str(node.target))
    # A weight with one scale is a constant that is dequantized.
    if is_scaled is None or node.args[0].op == "get_attr":
        return ""
    return "static" if is_scaled[2] == "default" else "dynamic"
