"""Corrections of XNNPACK's pass that puts transpositions around operators of images, for quantized programs.

Where one of the operators that read a dequantized tensor takes its channels last and others do not, ExecuTorch 1.5.1 gives all of
them the transposed one, so that the delegate fails. This happens to operators that are decomposed after quantization, such as a
PReLU with a computed weight or an InstanceNorm, and to layers that are also outputs. And it transposes in the wrong place where
scales are dynamic: behind those of a linear layer's input, which then does not count as quantized, and for a convolution not its
input but what that is computed from, such as an image that is also added, or tokens. And it looks at the first row of what comes
quantized from outside of the delegate, which fails where that has no dims, such as a mean over all of them.

Source: executorch/backends/xnnpack/_passes/channels_last_tagged_reshape_pass.py 1.5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from executorch.backends.xnnpack._passes.channels_last_tagged_reshape_pass import ChannelsLastTaggedReshapePass as Pass
from executorch.backends.xnnpack.utils.quant_utils import is_dynamic_qdq

Transpose = Callable[[Any, Any, Any, Any], None]
"""A method of the pass, which transposes a node for a user of it."""


@contextmanager
def separate() -> Iterator[None]:
    """Transpose for those operators alone that need it inside the context."""
    insert, to_first, to_last = Pass.insert_copy_q_dq, Pass.input_to_nchw, Pass.input_to_nhwc
    is_first, is_last = Pass.is_nchw_node, Pass.is_nhwc_node

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

    Pass.insert_copy_q_dq = insert_for_one
    Pass.is_nchw_node = staticmethod(lambda node: _has_no_dims(node) or is_first(node))
    Pass.is_nhwc_node = staticmethod(lambda node: not _has_no_dims(node) and is_last(node))
    Pass.input_to_nchw = _before_scales(to_first, Pass.is_nchw_node, Pass.mark_as_nchw_node)
    Pass.input_to_nhwc = _before_scales(to_last, Pass.is_nhwc_node, Pass.mark_as_nhwc_node)
    try:
        yield
    finally:
        Pass.insert_copy_q_dq, Pass.input_to_nchw, Pass.input_to_nhwc = insert, to_first, to_last
        Pass.is_nchw_node, Pass.is_nhwc_node = staticmethod(is_first), staticmethod(is_last)


def _has_no_dims(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _before_scales(transpose: Transpose, is_done: Callable[[Any], bool], mark: Callable[[Any], None]) -> Transpose:
    """Return a function that transposes a tensor before the dynamic scales that it is quantized with are computed."""

    def transpose_before(own: Any, module: Any, value: Any, user: Any) -> None:
        if not is_dynamic_qdq(value) or is_done(value):
            transpose(own, module, value, user)
            return
        quantize = value.args[0]
        source, choose = quantize.args[0], next(each.args[0] for each in quantize.all_input_nodes if each.target is getitem)
        for reader in (choose, quantize):
            transpose(own, module, source, reader)
        for node in (choose, *choose.users, quantize, value):
            mark(node)

    return transpose_before
