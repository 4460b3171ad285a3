"""Changes around quantization, for operators that XNNPACK computes in another way than the quantized graph says.

XNNPACK keeps one copy of a layer's weights and bias, with the scales of the layer's first use, and makes one operator of a layer
and the activation after it, which skips the quantization between them. Convolutions in one dimension it computes in two, and
then takes their inputs and outputs for quantized, though the convolution is not.
"""

from __future__ import annotations

import itertools

import torch
from executorch.backends.transforms.duplicate_dynamic_quant_chain import DuplicateDynamicQuantChainPass

from etfarm.server.compile.lower.annotations import Reviewed
from etfarm.server.compile.lower.selection import ANNOTATION, KEPT_IN_FP32
from etfarm.server.graphs.fusion import ACTIVATIONS, LAYERS, shared_layers


def copy_shared_layers(module: torch.fx.GraphModule) -> bool:
    """Give each layer that uses a parameter after the first one its own copy of it; return whether there are any."""
    copies = 0
    for node, layers in shared_layers(module.graph):
        path, _, leaf = str(node.target).rpartition(".")
        for layer in layers[1:] if node.op == "get_attr" else ():
            owner = module.get_submodule(path)
            name = _new_name(owner, f"{leaf}_copy")
            copied = getattr(owner, leaf).detach().clone()
            owner.register_parameter(name, torch.nn.Parameter(copied, requires_grad=False))
            with module.graph.inserting_after(node):
                duplicate = module.graph.get_attr(f"{path}.{name}" if path else name)
            duplicate.meta = dict(node.meta)
            layer.replace_input_with(node, duplicate)
            copies += 1
    module.recompile()
    return copies > 0


def copy_dynamic_scales(module: torch.fx.GraphModule) -> None:
    """Quantize an input with dynamic scales for each layer that takes it.

    XNNPACK quantizes a common input for one of them only, so that others are wrong if their kernels' sizes differ, and finds no
    partition of some decoders. ExecuTorch's scripts for language models do the same.
    """
    if any(str(node.target).startswith("quantized_decomposed.choose_qparams") for node in module.graph.nodes):
        DuplicateDynamicQuantChainPass()(module)


def widen_convolutions(module: torch.fx.GraphModule) -> None:
    """Compute convolutions in one dimension that stay in fp32 beside quantized operators in two."""
    for node in list(module.graph.nodes):
        wide = _WIDE.get(node.target)
        if wide is None or node.args[1].op != "get_attr":
            continue
        if not _is_dequantize(node.args[0]) and not any(map(_is_quantize, node.users)):
            continue
        node.args = tuple(
            [*value, _OF_ONE[argument.name]] if argument.name in _OF_ONE and isinstance(value, list | tuple) else value
            for value, argument in zip(node.args, node.target._schema.arguments, strict=False)
        )
        path, _, leaf = str(node.args[1].target).rpartition(".")
        owner = module.get_submodule(path)
        weight = getattr(owner, leaf).detach().unsqueeze(-1).contiguous()
        name = _new_name(owner, f"{leaf}_wide")
        owner.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        with module.graph.inserting_before(node):
            wide_input = module.graph.call_function(torch.ops.aten.unsqueeze.default, (node.args[0], -1))
            wide_weight = module.graph.get_attr(f"{path}.{name}" if path else name)
        node.target, node.args = wide, (wide_input, wide_weight, *node.args[2:])
        with module.graph.inserting_after(node):
            narrow = module.graph.call_function(torch.ops.aten.squeeze.dim, (node, -1))
        node.replace_all_uses_with(narrow, delete_user_cb=lambda user, own=narrow: user is not own)
        for added in (wide_input, wide_weight, narrow):
            added.meta = {key: value for key, value in node.meta.items() if key != "val"}
    module.graph.eliminate_dead_code()
    module.recompile()


_WIDE = {
    torch.ops.aten.conv1d.default: torch.ops.aten.conv2d.default,
    torch.ops.aten.conv1d.padding: torch.ops.aten.conv2d.padding,
    torch.ops.aten.conv_transpose1d.default: torch.ops.aten.conv_transpose2d.input,
}
_OF_ONE = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
"""What a convolution's arguments are in a dimension of one element."""


def _is_quantize(node: torch.fx.Node) -> bool:
    return str(node.target).startswith("quantized_decomposed.quantize")


def _is_dequantize(node: torch.fx.Node) -> bool:
    return str(node.target).startswith("quantized_decomposed.dequantize")


def _new_name(owner: torch.nn.Module, name: str) -> str:
    return next(each for count in itertools.count(1) if not hasattr(owner, each := f"{name}_{count}"))


class ActivationsFused(Reviewed):
    """A quantizer by which a layer and the only activation after it have one output scale: that of the activation.

    An activation that a recipe file skips stays in fp32.
    """

    has_fused = False
    """Whether `annotate` changed an operator."""

    def review(self, model: torch.fx.GraphModule) -> None:
        """Move the output of each layer behind its activation."""
        for node in model.graph.nodes:
            layer = node.args[0] if node.target in ACTIVATIONS else None
            if not isinstance(layer, torch.fx.Node) or layer.target not in LAYERS or len(layer.users) > 1:
                continue
            if node.meta.get(KEPT_IN_FP32):
                continue
            own = layer.meta.get(ANNOTATION)
            if own is not None and own.output_qspec is not None:
                node.meta[ANNOTATION] = type(own)(output_qspec=own.output_qspec, _annotated=True)
                own.output_qspec = None
                self.has_fused = True
