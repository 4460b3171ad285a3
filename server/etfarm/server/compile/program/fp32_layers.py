"""Heavy operators of a quantized program that still compute in fp32.

Does not import torch, like `places`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from etfarm.server.graphs.views import VIEWS, name_of

OPERANDS: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "_convolution",
         "linear", "matmul", "mm", "bmm", "mv", "inner", "tensordot"), (0, 1),
    ),
    **dict.fromkeys(("addmm", "addmv", "baddbmm", "addbmm"), (1, 2)),
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "bilinear"), (0, 1, 2)),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (2, 3)),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), (2, 3)),
    "einsum": (1,),
}  # fmt: skip
"""Heavy ATen operators, with the indices of the arguments that they multiply. Recurrent layers list only the weights, because
the other factors are computed inside of the layer."""

_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_THREE_DIMENSIONAL: Final = frozenset({"conv3d", "conv_transpose3d"})
_MAX_HOPS: Final = 16
_CONSTANTS: Final = frozenset({"PARAMETER", "BUFFER", "CONSTANT_TENSOR"})
_XNNPACK: Final = "executorch.backends.xnnpack."


def by_xnnpack(parts: Iterable[Any]) -> bool:
    """Return whether all quantizers or partitioners are XNNPACK's; True for an empty list."""
    return all(any(kind.__module__.startswith(_XNNPACK) for kind in type(part).__mro__) for part in parts)


def in_fp32(program: Any, *, xnnpack: bool) -> Iterator[Any]:
    """Yield the nodes of heavy operators that compute in fp32 only, including nodes in branches and loops.

    A layer is quantized if its weights come from a dequantize operator. Its input does not matter, because everything after
    a quantized layer comes from a dequantize operator. A product of values other than weights is quantized if all of them
    come from dequantize operators and the backend multiplies quantized values.

    Args:
        program: an ExportedProgram before the edge dialect.
        xnnpack: whether only XNNPACK or ExecuTorch's portable kernels compute the program. In int8, XNNPACK multiplies
            only by constants, convolves in one or two dimensions, and accepts weights with a single scale only if the input's
            scale is constant. Source: executorch.backends.xnnpack.partition.config, the precisions of BMMConfig and the
            checks of GEMMConfig and ConvolutionConfig.
    """
    origins = _Origins(program)
    for graph in origins.graphs:
        for node in graph.nodes:
            if node.op == "call_function" and name_of(node) in OPERANDS and not origins.is_quantized(node, xnnpack):
                yield node


class _Origins:
    """The origins of the operands of a program's nodes."""

    def __init__(self, program: Any) -> None:
        self.graphs = [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]
        signature = program.graph_signature
        constants = {spec.arg.name for spec in signature.input_specs if spec.kind.name in _CONSTANTS}
        constants -= set(signature.buffers_to_mutate.values())  # mutable, so not constants
        self._constants = {node for node in program.graph.nodes if node.op == "placeholder" and node.name in constants}
        self._branch_arguments = {inner: outer for graph in self.graphs for inner, outer in _branch_inputs(graph)}

    def is_quantized(self, node: Any, xnnpack: bool) -> bool:
        """Return whether a heavy operator computes on quantized values."""
        operands = list(_operands(node))
        weights = [operand for operand in operands if self._is_constant(operand)]
        dequantized = [self._find_dequantize(operand) for operand in weights or operands]
        if None in dequantized or not dequantized:
            return False
        if not xnnpack:
            return True
        has_single_scale = any("per_tensor" in str(source.target) for source in dequantized)
        has_dynamic_scale = any(map(_is_dynamically_scaled, map(self._find_dequantize, operands)))
        return bool(weights) and name_of(node) not in _THREE_DIMENSIONAL and not (has_single_scale and has_dynamic_scale)

    def _find_dequantize(self, value: Any) -> Any:
        """Return the dequantize operator that a value comes from, through any views; None if there is none."""
        for node in self._trace_views(value, through_quantization=False):
            if "dequantize" in str(node.target):
                return node
        return None

    def _is_constant(self, value: Any) -> bool:
        return any(node in self._constants for node in self._trace_views(value, through_quantization=True))

    def _trace_views(self, value: Any, through_quantization: bool) -> Iterator[Any]:
        """Yield a node and the nodes that it is a view of."""
        for _ in range(_MAX_HOPS):
            if not hasattr(value, "all_input_nodes"):  # a number, or no argument
                return
            yield value
            quantization = through_quantization and value.op == "call_function" and "quantize" in str(value.target)
            if value in self._branch_arguments:
                value = self._branch_arguments[value]
            elif value.op == "call_function" and value.args and (quantization or name_of(value) in VIEWS):
                value = value.args[0]
            else:
                return


def _operands(node: Any) -> Iterator[Any]:
    """Yield the operands that a heavy operator multiplies."""
    operator = name_of(node)
    for index in OPERANDS[operator]:
        argument = node.args[index] if index < len(node.args) else None
        if operator in _RECURRENT:
            # The list of parameters, which comes one argument later for packed sequences. Biases have one dim.
            parameters = argument if isinstance(argument, list | tuple) else ()
            yield from (parameter for parameter in parameters if len(parameter.meta["val"].shape) > 1)
        elif isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def _branch_inputs(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each placeholder of a graph's branches and loop bodies, with the argument that is passed to it.

    Source: torch.ops.higher_order's cond, while_loop, scan and map_impl, which all refer to the graphs as attributes and
    pass them the concatenation of their lists of operands.
    """
    for node in graph.nodes:
        attributes = [source for source in node.all_input_nodes if source.op == "get_attr"]
        graphs = [getattr(graph.owning_module, attribute.target, None) for attribute in attributes]
        operands = [operand for argument in node.args if isinstance(argument, list | tuple) for operand in argument]
        for module in graphs:
            if module is not None and hasattr(module, "graph"):
                yield from zip((inner for inner in module.graph.nodes if inner.op == "placeholder"), operands, strict=False)


def _is_dynamically_scaled(dequantize: Any) -> bool:
    """Return whether the scale is computed at run time from the value itself."""
    scales = () if dequantize is None else dequantize.all_input_nodes
    return any("choose_qparams" in str(source.target) for scale in scales for source in scale.all_input_nodes)
