"""A reader of the graph that a program holds for XNNPACK, with a debug handle for each node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from etfarm.wire.errors import FarmError
from etfarm.wire.flatbuffer import Table
from etfarm.wire.program_tables import xnnpack_graph

NAME: Final = "XnnpackBackend"
"""The name of XNNPACK's backend in programs."""

_INSERTED: Final = 65535
_EXTERNAL_OUTPUT: Final = 2

_UNARY: Final = ((0,), (1,))
_BINARY: Final = ((0, 1), (2,))
_POOLING: Final = ((10,), (11,))
_CONVOLUTION: Final = ((15, 16, 17), (18,))
_CONCATENATE: Final = ((1, 2, 3, 4, 7), (5,))
_ACTIVATION: Final = ((1,), (2,))

_KINDS: Final[tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]], ...]] = (
    ("Add", _BINARY),
    ("FullyConnected", ((0, 1, 2), (3,))),
    ("Softmax", _UNARY),
    ("Sigmoid", _UNARY),
    ("StaticTranspose", ((2,), (3,))),
    ("Clamp", _UNARY),
    ("Conv2d", _CONVOLUTION),
    ("Div", _BINARY),
    ("StaticResizeBilinear2D", ((2,), (3,))),
    ("StaticConstantPad", ((3,), (4,))),
    ("AvgPooling2d", _POOLING),
    ("Minimum", _BINARY),
    ("DepthwiseConv2d", _CONVOLUTION),
    ("MaxPooling2d", _POOLING),
    ("Multiply", _BINARY),
    ("Subtract", _BINARY),
    ("Floor", _UNARY),
    ("Convert", _UNARY),
    ("GlobalAvgPooling2d", _UNARY),
    ("StaticReshape", ((2,), (3,))),
    ("ArgMaxPooling2d", ((6,), (7, 8))),
    ("SquareRoot", _UNARY),
    ("Ceiling", _UNARY),
    ("Hardswish", _UNARY),
    ("LeakyReLU", _ACTIVATION),
    ("Maximum", _BINARY),
    ("Negate", _UNARY),
    ("Square", _UNARY),
    ("ELU", _ACTIVATION),
    ("Abs", _UNARY),
    ("PReLU", _BINARY),
    ("Concatenate2", _CONCATENATE),
    ("Concatenate3", _CONCATENATE),
    ("Concatenate4", _CONCATENATE),
    ("StaticSlice", ((3,), (4,))),
    ("ScaledDotProductAttention", ((0, 1, 2, 3, 4), (5,))),
    ("BatchMatrixMultiply", _BINARY),
    ("Concatenate5", _CONCATENATE),
    ("ConvTranspose2d", _CONVOLUTION),
    ("ReciprocalSquareRoot", _UNARY),
    ("Log", _UNARY),
    ("Gelu", _UNARY),
    ("Tanh", _UNARY),
    ("Exp", _UNARY),
    ("Sin", _UNARY),
    ("Copy", _UNARY),
    ("Cos", _UNARY),
)
"""The members of the schema's XNodeUnion in its order, each with the fields that hold the ids of its inputs and outputs."""

CLAMPS: Final = frozenset({"relu", "relu6", "hardtanh", "clamp"})
"""Operators that only clamp their input, which the preceding node can do as well."""

OPERATORS: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(names.split())
    for kind, names in {
        "Add": "add",
        "BatchMatrixMultiply": "bmm",
        "Clamp": " ".join(sorted(CLAMPS)),
        "Conv2d": "convolution",
        "ConvTranspose2d": "convolution",
        "DepthwiseConv2d": "convolution",
        "Div": "div",
        "FullyConnected": "linear addmm mm",
        "GlobalAvgPooling2d": "mean",
        "Multiply": "mul",
        "Sigmoid": "sigmoid",
        "StaticReshape": "view_copy squeeze_copy unsqueeze_copy",
        "StaticTranspose": "permute_copy",
        "Subtract": "sub",
    }.items()
}
"""Base names of the operators that become each kind of node; only kinds into which one operator decomposes together."""


_MOST_DIMS: Final = 16
"""Maximum number of dims of a value; XNNPACK itself supports 6."""


class BadGraph(FarmError):
    """A delegate whose bytes are not an XNNPACK graph."""

    reason = "BAD_XNNPACK_GRAPH"


@dataclass(frozen=True)
class Value:
    """An input or output of an XNNPACK node."""

    datatype: int = 1
    """The schema's XNNDatatype: 1 fp32, 3 qint8, 9 qdint8, ..."""
    output: bool = False
    """Whether it is an output of the delegate."""
    constant: bool = False
    elements: int = 0
    """Number of elements; 0 if a dimension is dynamic."""


@dataclass(frozen=True)
class XNode:
    """One operation as ExecuTorch handed it to XNNPACK."""

    kind: str
    """The schema's name without XNN, such as `Conv2d`."""
    debug_handle: int | None
    """None for a node that ExecuTorch inserted (a change of layout or type)."""
    clamped: bool
    """Whether its outputs are clamped to a range, as by a fused relu."""
    inputs: tuple[int, ...]
    """Ids of values; without a bias, its id is absent."""
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class XGraph:
    """One delegate's graph, with nodes in order of execution."""

    nodes: tuple[XNode, ...]
    values: Mapping[int, Value]


def read(data: bytes | memoryview) -> XGraph:
    """Return the graph in the bytes of an XNNPACK delegate; its weights stay unread.

    Raises:
        BadGraph: the bytes are not an XNNPACK graph, or have an unknown layout.
    Source: executorch/backends/xnnpack/serialization/schema.fbs. ExecuTorch's own reader starts a subprocess for each delegate.
    """
    try:
        root = xnnpack_graph(data)
        if root is None:
            raise BadGraph(f"A delegate's {len(data)} bytes have no header of XNNPACK's.", size_bytes=len(data))
        values = dict(_value(table) for table in root.tables(2))
        return XGraph(tuple(_node(table, values) for table in root.tables(1)), values)
    except (IndexError, ValueError) as error:
        raise BadGraph(f"A delegate's {len(data)} bytes cannot be read ({error}).", size_bytes=len(data)) from error


def _value(table: Table) -> tuple[int, Value]:
    value = table.table(1)
    if table.number(0, "<B") == 2 and value is not None:
        value = value.table(0)  # a quantized value holds its tensor next to its scales
    if value is None:
        raise ValueError("a value is empty")
    output = bool(value.number(5) & _EXTERNAL_OUTPUT)
    return value.number(6), Value(value.number(0, "<h"), output, value.number(3) != 0, _elements(value.numbers(2)))


def _elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a tensor; 0 if a dimension is dynamic.

    Raises:
        ValueError: it has more elements than fit in any memory; products with a million digits would take hours.
    """
    if len(shape) > _MOST_DIMS or (0 not in shape and math.prod(shape) >= 1 << 63):
        raise ValueError(f"a value has {len(shape)} dims of {shape[:_MOST_DIMS]}")
    return math.prod(shape)


def _node(table: Table, values: Mapping[int, Value]) -> XNode:
    number, union, handle = table.number(0, "<B"), table.table(1), table.number(2)
    if union is None or not 1 <= number <= len(_KINDS):
        raise ValueError(f"a node has the unknown kind {number}")
    kind, (inputs, outputs) = _KINDS[number - 1]
    if kind.startswith("Concatenate"):
        inputs = inputs[: int(kind[-1])]  # the unused fields hold 0, which is a valid id
    input_ids = tuple(number for slot in inputs if (number := union.number(slot)) in values)
    output_ids = tuple(union.number(slot) for slot in outputs)
    if not input_ids or not values.keys() >= set(output_ids):
        raise ValueError(f"a node of the kind {kind} has no inputs or no outputs")
    return XNode(kind, None if handle == _INSERTED else handle, table.table(3) is not None, input_ids, output_ids)
