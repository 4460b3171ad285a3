"""Constants of one XNNPACK delegate that several of its operators use, each in its own way.

ExecuTorch 1.5.1 writes one value for a constant, in the form that its first use needs. A convolution's weights have their
channels last, and a transposed convolution's are swapped as well: another operator fails or computes with wrong values. And the
runtime frees the weights and biases of layers, which XNNPACK has copied when it loads the program, although other operators, such
as a product of matrices, read them at each execution: a program that is loaded from a file then crashes, or computes with
whatever is in this memory by then.

Source: `define_tensor` of executorch/backends/xnnpack/operators/node_visitor.py and `getPackedValueIds` of
executorch/backends/xnnpack/runtime/XNNCompiler.cpp 1.5.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final

import torch
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from executorch.backends.xnnpack.serialization.xnnpack_graph_schema import XNNQuantizedTensorValue
from executorch.backends.xnnpack.utils.utils import is_param_node

_COPIED: Final = ("filter_id", "bias_id")
"""Fields of operators that refer to constants which XNNPACK copies when it loads a program."""


@contextmanager
def separate() -> Iterator[None]:
    """Give each kind of use of a constant a value of its own inside the context; equal bytes are in the program once."""
    define, serialize = NodeVisitor.define_tensor, xnnpack_preprocess.serialize_xnnpack_binary

    def define_anew(
        own: Any, node: Any, graph: Any, ids: dict[Any, int], *layout: Any, quant_params: Any = None, **more: Any
    ) -> None:
        source = node if quant_params is None else quant_params.q_input
        if is_param_node(own.exported_program, source) and not _is_quantized_bias(graph, ids.get(source), quant_params):
            for known in (node, source):
                ids.pop(known, None)
        define(own, node, graph, ids, *layout, quant_params=quant_params, **more)

    def serialize_joined(graph: Any, data: Any) -> Any:
        _join_equal(graph)
        return serialize(graph, data)

    NodeVisitor.define_tensor, xnnpack_preprocess.serialize_xnnpack_binary = define_anew, serialize_joined
    try:
        yield
    finally:
        NodeVisitor.define_tensor, xnnpack_preprocess.serialize_xnnpack_binary = define, serialize


def _join_equal(graph: Any) -> None:
    """Leave one value for equal uses of equal constants, so that the runtime does not load them for each."""
    operators = [node.xnode_union for node in graph.xnodes]
    copied = {getattr(operator, field) for operator in operators for field in _COPIED if hasattr(operator, field)}
    firsts: dict[Hashable, int] = {}
    joined: dict[int, int] = {}
    for value in graph.xvalues:
        described = asdict(value.xvalue_union)
        tensor = described.get("tensor_value", described)
        identifier = tensor.pop("id_out")
        if tensor["constant_buffer_idx"]:
            for part in (tensor, described.get("quant_params", {})):
                part.update({k: graph.constant_data[v].named_key for k, v in part.items() if k.endswith("buffer_idx")})
            joined[identifier] = firsts.setdefault((identifier in copied, repr(described)), identifier)
    for operator in operators:
        vars(operator).update({k: joined[v] for k, v in vars(operator).items() if k.endswith("_id") and v in joined})
    graph.xvalues[:] = [v for v in graph.xvalues if (at := _identifier(v)) == joined.get(at, at)]


def _is_quantized_bias(graph: Any, known: int | None, quant_params: Any) -> bool:
    """Return whether a bias has scales of another layer already; the recipes' `copy_shared_layers` separates quantized layers."""
    return (
        known is not None and quant_params is not None and quant_params.dtype == torch.int32
        and isinstance(graph.xvalues[known].xvalue_union, XNNQuantizedTensorValue)
    )  # fmt: skip


def _identifier(value: Any) -> int:
    union = value.xvalue_union
    return int(getattr(union, "tensor_value", union).id_out)
