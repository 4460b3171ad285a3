"""Corrections of XNNPACK's pass that puts transpositions around operators of images, for quantized programs.

Where one of the operators that read a dequantized tensor takes its channels last and others do not, ExecuTorch 1.5.1 gives all of
them the transposed one, so that the delegate fails. This happens to operators that are decomposed after quantization, such as a
PReLU with a computed weight or an InstanceNorm, and to layers that are also outputs. And it transposes behind dynamic scales of a
linear layer's input, which then does not count as quantized.

Source: executorch/backends/xnnpack/_passes/channels_last_tagged_reshape_pass.py 1.5.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from executorch.backends.xnnpack._passes.channels_last_tagged_reshape_pass import ChannelsLastTaggedReshapePass as Pass
from executorch.backends.xnnpack.utils.quant_utils import is_dynamic_qdq


@contextmanager
def separate() -> Iterator[None]:
    """Transpose for those operators alone that need it inside the context."""
    insert, to_contiguous = Pass.insert_copy_q_dq, Pass.input_to_nchw

    def insert_for_one(own: Any, module: Any, before: Any, after: Any, copy: Any, parameters: Any) -> None:
        is_for_images = copy.kwargs["memory_format"] == torch.channels_last
        others = [user for user in before.users if user not in (copy, after)]
        if any(not (is_for_images and own.requires_nhwc_input(user)) for user in others):
            with module.graph.inserting_after(before):
                duplicate = module.graph.call_function(before.target, before.args, before.kwargs)
            duplicate.meta = before.meta.copy()
            for user in (copy, after):
                user.replace_input_with(before, duplicate)
            before = duplicate
        insert(own, module, before, after, copy, parameters)

    def transpose_before_scales(own: Any, module: Any, value: Any, user: Any) -> Any:
        if not is_dynamic_qdq(value) or not Pass.is_nhwc_node(value):
            return to_contiguous(own, module, value, user)
        quantize = value.args[0]
        source, choose = quantize.args[0], next(each.args[0] for each in quantize.all_input_nodes if each.target is getitem)
        for reader in (choose, quantize):
            to_contiguous(own, module, source, reader)
        for node in (choose, *choose.users, quantize, value):
            own.mark_as_nchw_node(node)
        return None

    Pass.insert_copy_q_dq, Pass.input_to_nchw = insert_for_one, transpose_before_scales
    try:
        yield
    finally:
        Pass.insert_copy_q_dq, Pass.input_to_nchw = insert, to_contiguous
