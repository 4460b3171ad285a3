"""Which heavy operators of a quantized program compute on what was quantized, and which on fp32 alone.

Torch is not imported, as in `places`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

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
"""Heavy operators of ATen, and which of their arguments are multiplied. Of recurrent layers those are the weights only: what
these are multiplied with is made inside of the layer."""

_RECURRENT: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_THREE_DIMENSIONAL: Final = frozenset({"conv3d", "conv_transpose3d"})
_VIEWS: Final = frozenset(
    {"t", "numpy_T", "permute", "transpose", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
     "select", "slice", "contiguous", "clone", "alias", "detach", "to", "_to_copy"}
)  # fmt: skip
_MAX_HOPS: Final = 16
_CONSTANTS: Final = frozenset({"PARAMETER", "BUFFER", "CONSTANT_TENSOR"})
_XNNPACK: Final = "executorch.backends.xnnpack."


def by_xnnpack(parts: Iterable[Any]) -> bool:
    """Whether quantizers, or partitioners, are all of XNNPACK; so they are where there are none."""
    return all(any(kind.__module__.startswith(_XNNPACK) for kind in type(part).__mro__) for part in parts)


def name_of(node: Any) -> str:
    """`linear` of aten.linear.default."""
    return str(getattr(node, "target", "")).removeprefix("aten.").partition(".")[0]


def in_fp32(program: Any, *, xnnpack: bool) -> Iterator[Any]:
    """The nodes of heavy operators that compute on fp32 alone, those in branches and loops among them.

    Layers that do not have weights that a dequantize operator made. That their input was made by one says nothing: so is
    everything behind a quantized layer. Products of values that are no weights have all of these from dequantize operators,
    and a backend that multiplies what was quantized.

    Args:
        program: an ExportedProgram before edge.
        xnnpack: whether XNNPACK, or ExecuTorch's portable kernels, are all that is to compute it. In int8 it multiplies with
            constants only, convolves in one or two dimensions, and takes weights of one scale only where the input's scale is
            constant. Source: executorch.backends.xnnpack.partition.config, the precisions of BMMConfig and what GEMMConfig
            and ConvolutionConfig refuse.
    """
    origins = _Origins(program)
    for graph in origins.graphs:
        for node in graph.nodes:
            if node.op == "call_function" and name_of(node) in OPERANDS and not origins.is_quantized(node, xnnpack):
                yield node


class _Origins:
    """What operands of a program's nodes were made of."""

    def __init__(self, program: Any) -> None:
        self.graphs = [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]
        signature = program.graph_signature
        constants = {spec.arg.name for spec in signature.input_specs if spec.kind.name in _CONSTANTS}
        constants -= set(signature.buffers_to_mutate.values())  # values like others
        self._constants = {node for node in program.graph.nodes if node.op == "placeholder" and node.name in constants}
        self._given = {inner: outer for graph in self.graphs for inner, outer in _given_to_branches(graph)}

    def is_quantized(self, node: Any, xnnpack: bool) -> bool:
        """Whether a heavy operator computes on what was quantized."""
        operands = list(_operands(node))
        weights = [one for one in operands if self._is_constant(one)]
        dequantized = [self._dequantizing(one) for one in weights or operands]
        if None in dequantized or not dequantized:
            return False
        if not xnnpack:
            return True
        one_scale = any("per_tensor" in str(one.target) for one in dequantized)
        scaled_at_run_time = any(map(_is_scaled_at_run_time, map(self._dequantizing, operands)))
        return bool(weights) and name_of(node) not in _THREE_DIMENSIONAL and not (one_scale and scaled_at_run_time)

    def _dequantizing(self, value: Any) -> Any:
        """The dequantize operator that made a value, however it was laid out since; None where none did."""
        for one in self._upward(value, through_quantization=False):
            if "dequantize" in str(one.target):
                return one
        return None

    def _is_constant(self, value: Any) -> bool:
        return any(one in self._constants for one in self._upward(value, through_quantization=True))

    def _upward(self, value: Any, through_quantization: bool) -> Iterator[Any]:
        """A node, and those that it was laid out from."""
        for _ in range(_MAX_HOPS):
            if not hasattr(value, "all_input_nodes"):  # a number, or no argument
                return
            yield value
            quantization = through_quantization and value.op == "call_function" and "quantize" in str(value.target)
            if value in self._given:
                value = self._given[value]
            elif value.op == "call_function" and value.args and (quantization or name_of(value) in _VIEWS):
                value = value.args[0]
            else:
                return


def _operands(node: Any) -> Iterator[Any]:
    """What a heavy operator multiplies."""
    operator = name_of(node)
    for index in OPERANDS[operator]:
        argument = node.args[index] if index < len(node.args) else None
        if operator in _RECURRENT:
            # Its list of parameters, which is behind one more argument where the sequences are packed. Biases have one dim.
            parameters = argument if isinstance(argument, list | tuple) else ()
            yield from (one for one in parameters if len(one.meta["val"].shape) > 1)
        elif isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument


def _given_to_branches(graph: Any) -> Iterator[tuple[Any, Any]]:
    """The placeholders of a graph's branches and the bodies of its loops, and what each is given.

    Source: torch.ops.higher_order's cond, while_loop, scan and map_impl, which all have the graphs as attributes and give
    them their lists of operands, one behind the other.
    """
    for node in graph.nodes:
        inner = [one for one in node.all_input_nodes if one.op == "get_attr"]
        graphs = [getattr(graph.owning_module, one.target, None) for one in inner]
        given = [one for argument in node.args if isinstance(argument, list | tuple) for one in argument]
        for module in graphs:
            if module is not None and hasattr(module, "graph"):
                yield from zip((one for one in module.graph.nodes if one.op == "placeholder"), given, strict=False)


def _is_scaled_at_run_time(dequantizing: Any) -> bool:
    """Whether the scale is found at run time, from the value itself."""
    scales = () if dequantizing is None else dequantizing.all_input_nodes
    return any("choose_qparams" in str(source.target) for scale in scales for source in scale.all_input_nodes)
