"""The graph that a program holds for XNNPACK, with a debug handle for each of its nodes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from etfarm.wire.errors import FarmError
from etfarm.wire.flatbuffer import Table

NAME: Final = "XnnpackBackend"
"""XNNPACK's delegate, as programs name it."""

_MAGIC: Final = b"XH00"
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
"""The members of the schema's XNodeUnion in its order, and the fields of each that are the ids of its inputs and outputs."""

CLAMPS: Final = frozenset({"relu", "relu6", "hardtanh", "clamp"})
"""Operators that only limit their input, which a node before them can do as well."""

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
"""Operators that become a kind of node, by their base names; only of kinds that one decomposed operator has together."""


_MOST_DIMS: Final = 16
"""XNNPACK has 6."""


class BadGraph(FarmError):
    """A delegate's bytes are no graph of XNNPACK's."""

    reason = "BAD_XNNPACK_GRAPH"


@dataclass(frozen=True)
class Value:
    """What an XNNPACK node takes or gives."""

    datatype: int = 1
    """XNNDatatype of the schema: 1 fp32, 3 qint8, 9 qdint8, ..."""
    output: bool = False
    """Whether it leaves the delegate."""
    constant: bool = False
    elements: int = 0
    """0 where a dimension is dynamic."""


@dataclass(frozen=True)
class XNode:
    """One operation as ExecuTorch handed it to XNNPACK."""

    kind: str
    """`Conv2d`, as the schema names it without XNN."""
    debug_handle: int | None
    """None for one that ExecuTorch inserted (a change of layout or type)."""
    clamped: bool
    """Whether its outputs are clamped to a range, which a fused relu becomes."""
    inputs: tuple[int, ...]
    """Ids of values; one that takes no bias leaves its id out."""
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class XGraph:
    """One delegate's graph; nodes are in order of execution."""

    nodes: tuple[XNode, ...]
    values: Mapping[int, Value]


def read(data: bytes | memoryview) -> XGraph:
    """Return the graph in the bytes of an XNNPACK delegate; its weights stay unread.

    Raises:
        BadGraph: the bytes are none, or of a layout that is not known.
    Source: executorch/backends/xnnpack/serialization/schema.fbs, and XNNHeader beside it. ExecuTorch's own way there is a
        subprocess for each delegate.
    """
    try:
        if bytes(data[4:8]) != _MAGIC:
            raise BadGraph(f"A delegate's {len(data)} bytes have no header of XNNPACK's.", size_bytes=len(data))
        offset, size = struct.unpack_from("<II", data, 10)
        flat = bytes(data[offset : offset + size])
        root = Table.root(flat)
        values = dict(_value(table) for table in root.tables(2))
        return XGraph(tuple(_node(table, values) for table in root.tables(1)), values)
    except (struct.error, IndexError, ValueError) as error:
        raise BadGraph(f"A delegate's {len(data)} bytes cannot be read ({error}).", size_bytes=len(data)) from error


def _value(table: Table) -> tuple[int, Value]:
    value = table.table(1)
    if table.number(0, "<B") == 2 and value is not None:
        value = value.table(0)  # a quantized value holds its tensor beside its scales
    if value is None:
        raise ValueError("a value is empty")
    output = bool(value.number(5) & _EXTERNAL_OUTPUT)
    return value.number(6), Value(value.number(0, "<h"), output, value.number(3) != 0, _elements(value.numbers(2)))


def _elements(shape: tuple[int, ...]) -> int:
    """Return how many elements a tensor has; 0 where a dimension is dynamic.

    Raises:
        ValueError: it has more than any memory holds: numbers of a million digits take hours.
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
        inputs = inputs[: int(kind[-1])]  # the others say 0, which is a value of its own
    taken = tuple(number for slot in inputs if (number := union.number(slot)) in values)
    given = tuple(union.number(slot) for slot in outputs)
    if not taken or not values.keys() >= set(given):
        raise ValueError(f"a node of the kind {kind} has no inputs or no outputs")
    return XNode(kind, None if handle == _INSERTED else handle, table.table(3) is not None, taken, given)
