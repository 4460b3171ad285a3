"""Static quantization of models in half precision, most of which XNNPACK computes wrongly or not at all.

With ExecuTorch 1.5, convolutions and pools of quantized float16 give garbage or crash, and there are no kernels that quantize
bfloat16. Linears and elementwise operators of float16 work.
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
    """Refuse operators whose activations a graph quantizes with scales from calibration, in a dtype that does not work.

    Raises:
        StageFailed: an operator takes or gives such activations.
    """
    for node in module.graph.nodes:
        if node.op != "call_function" or str(node.target).startswith("quantized_decomposed."):
            continue
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if dtype not in (torch.float16, torch.bfloat16) or (dtype == torch.float16 and not _IMAGES.match(name_of(node))):
            continue
        if any(_is_static(each) for each in (*node.all_input_nodes, *node.users)):
            why = f"static quantization does not work for this operator in {str(dtype)[6:]}: {describe_node(node)}."
            remedy = "Quantize the model in float32, with inputs in float32 too: model.float(), before the export."
            raise StageFailed("QUANTIZE", "HalfPrecision", why, remedy)


def _is_static(node: Any) -> bool:
    is_scaled = re.match(r"quantized_decomposed\.(de)?quantize_per_tensor\.default", str(node.target))
    # A weight with one scale is a constant that is dequantized.
    return bool(is_scaled) and node.args[0].op != "get_attr"
