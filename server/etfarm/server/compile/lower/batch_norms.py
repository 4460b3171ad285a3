"""Batch norms behind layers, which torchao and XNNPACK's passes fold into these.

Both also fold where that changes the model or fails: into weights that several layers share, into transposed convolutions with
groups and into layers of tokens, and torchao also into a layer whose output is used elsewhere, and what is behind a batch norm
that it has folded. These batch norms are computed apart, by a product and a sum. Behind a quantized layer, XNNPACK would make a
convolution of them, with which it mixes up the scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from etfarm.server.graphs.fusion import LAYERS

_ATEN: Final = torch.ops.aten
_BATCH_NORM: Final = _ATEN.batch_norm.default
_TRANSPOSED: Final = (_ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input, _ATEN.conv_transpose3d.input)
_REMOVED: Final = (
    _ATEN.dropout.default, _ATEN.dropout_.default, _ATEN.feature_dropout.default, _ATEN.clone.default, _ATEN.detach.default,
    _ATEN.alias.default, _ATEN.contiguous.default,
)  # fmt: skip
_GROUPS: Final = 6
"""Position of the number of groups among the arguments of transposed convolutions."""


def kept_batch_norm(*args: Any) -> Any:
    """Compute a batch norm; torchao does not know it as one."""
    return _BATCH_NORM(*args)


def keep_what_cannot_be_folded(module: GraphModule, quantizers: Iterable[Any]) -> None:
    """Hide the batch norms from torchao that it must not fold into a layer.

    These are also those that are behind a layer only after another batch norm has been folded: torchao drops the second one of a
    chain, and folds what is behind one output of several. Then no batch norm is left when the quantizers annotate the graph.
    XNNPACK's do not look for any: they would export twelve patterns each time, for two fifths of a small model's quantization,
    as torchao does when it converts, if it finds a batch norm.
    """
    for quantizer in quantizers:
        if isinstance(quantizer, XNNPACKQuantizer):
            quantizer.SUPPORTED_PATTERNS = [each for each in quantizer.SUPPORTED_PATTERNS if "_bn" not in each.name]
    for part in _graphs(module):
        # As these patterns do, but for parameters, whose names recipe files may name.
        part.graph.eliminate_dead_code(lambda node: node.op == "get_attr" or node.is_impure())
        constants = {node: _value(node, part) for node in part.graph.nodes if node.op == "get_attr"}
        uses = _uses(constants)
        for node in part.graph.nodes:
            if node.target is _BATCH_NORM and not (_is_layer(node.args[0]) and _can_be_folded(node, constants, uses)):
                node.target = kept_batch_norm
        part.recompile()


def show_what_was_kept(module: GraphModule) -> None:
    """Undo `keep_what_cannot_be_folded` in what torchao made of the module."""
    for part in _graphs(module):
        for node in part.graph.nodes:
            if node.target is kept_batch_norm:
                node.target = _BATCH_NORM
        part.recompile()


def compute_apart(program: Any) -> None:
    """Replace the batch norms behind layers that cannot be folded into them, or behind batch norms, by products and sums."""
    constants = _constants(program)
    uses = _uses(constants)
    for node in [node for node in program.graph.nodes if node.target is _BATCH_NORM]:
        layer = node.args[0]
        # Lowering removes dropout and copies, and XNNPACK folds then.
        while isinstance(layer, Node) and (str(layer.target).startswith("quantized_decomposed.") or layer.target in _REMOVED):
            layer = layer.args[0]
        if not isinstance(layer, Node) or layer.target not in (*LAYERS, _BATCH_NORM):
            continue
        is_direct = layer is node.args[0] and layer.target in LAYERS
        if not is_direct or not _can_be_folded(node, constants, uses):
            _replace(program, node, constants)
    program.graph_module.recompile()


def _constants(program: Any) -> dict[Node, Any]:
    """Return the values of placeholders of parameters, buffers and constants."""
    signature, values = program.graph_signature, {**program.constants, **program.state_dict}
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    changed = set(signature.buffers_to_mutate.values())
    return {
        node: values[names[node.name]]
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and names[node.name] not in changed
    }


def _replace(program: Any, node: Node, constants: Mapping[Node, Any]) -> None:
    x, *parameters = node.args[:5]
    if not all(value is None or value in constants for value in parameters) or _has_own_statistics(node):
        return
    weight, bias, mean, variance = (None if each is None else constants[each].detach().double() for each in parameters)
    scale = torch.rsqrt(variance + node.args[7]) * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    value = node.meta["val"]
    shape = [1, -1] + [1] * (value.dim() - 2)  # passes of quantized programs expect operands of one rank
    first = next(iter(program.graph.nodes))
    with program.graph.inserting_before(first):
        scale, shift = (
            create_constant_placeholder(
                program,
                program.graph,
                _unused(program, f"{node.name}_{name}"),
                InputKind.PARAMETER,
                data.to(value.dtype).reshape(shape),
            )
            for name, data in (("scale", scale), ("shift", shift))
        )
    with program.graph.inserting_before(node):
        product = program.graph.call_function(_ATEN.mul.Tensor, (x, scale))
        total = program.graph.call_function(_ATEN.add.Tensor, (product, shift))
    product.meta, total.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(total)
    program.graph.erase_node(node)


def _unused(program: Any, name: str) -> str:
    """Return a name that no node and no parameter has, since it would be taken for a known constant."""
    known = {node.name for node in program.graph.nodes} | program.state_dict.keys() | program.constants.keys()
    return name if name not in known else _unused(program, f"{name}_")


def _graphs(module: GraphModule) -> list[GraphModule]:
    return [part for part in module.modules() if isinstance(part, GraphModule)]


def _uses(constants: Mapping[Node, Any]) -> Counter[int]:
    """Count the uses of each tensor, by its identity."""
    uses = Counter[int]()
    for node, value in constants.items():
        uses[id(value)] += len(node.users)
    return uses


def _value(node: Node, module: GraphModule) -> Any:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _has_own_statistics(node: Node) -> bool:
    """Return whether a batch norm computes with the statistics of its input."""
    return bool(node.args[5]) or node.args[3] is None


def _is_layer(node: Any) -> bool:
    return isinstance(node, Node) and str(node.target).startswith(("aten.conv", "aten.linear."))


def _can_be_folded(node: Node, constants: Mapping[Node, Any], uses: Counter[int]) -> bool:
    layer, *parameters = node.args[:5]
    if not isinstance(layer, Node) or layer.op != "call_function" or len(layer.users) > 1:
        return False
    if _has_own_statistics(node):
        return False
    if layer.target is _ATEN.linear.default and layer.meta["val"].dim() > 2:  # its channels are not the layer's features
        return False
    if layer.target in _TRANSPOSED and len(layer.args) > _GROUPS and layer.args[_GROUPS] != 1:
        return False
    weights = [weight for weight in layer.args[1:3] if weight is not None]
    if not all(value in constants for value in (*weights, *parameters) if value is not None):
        return False
    return all(uses[id(constants[weight])] == 1 for weight in weights if isinstance(weight, Node))
