"""The check that inputs fit a method, before anything is sent to a device. Also runs in the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from etfarm.v1 import common_pb2
from etfarm.v1.compile_pb2 import DimRange, MethodFacts, ValueSpec
from etfarm.wire import size_relations
from etfarm.wire.errors import UserError
from etfarm.wire.fixed_numbers import how_to_vary
from etfarm.wire.messages import from_scalar
from etfarm.wire.tensors import Layout, Scalar, Tensor
from etfarm.wire.words import word_of

_KINDS = {"int": int, "double": float, "bool": bool}

_NAMES = {"double": "float"}
"""Names of kinds in messages, where Python's name differs."""


Value = Tensor | Layout | Scalar
"""An input to check. The bytes of tensors are ignored."""


class InputMismatch(UserError):
    """The inputs do not fit the method."""

    reason = "INPUT_MISMATCH"


class CountMismatch(InputMismatch):
    """The number of inputs differs from the method's."""

    def __init__(self, method: str, names: Sequence[str], got: int) -> None:
        count, listed = len(names), ", ".join(names)
        takes = f"{count} input{'s' if count > 1 else ''} ({listed})" if names else "no inputs"
        super().__init__(
            f"{method} takes {takes}, got {got or 'none'}.",
            "Give one value for each, in this order." if names else "Give none.",
            method=method, input="", what="count", expected=f"{count} ({listed})" if names else "0", got=got,
        )  # fmt: skip


class ValueMismatch(InputMismatch):
    """An input does not fit the method."""

    def __init__(self, method: str, argument: str, what: str, expected: str, got: str, remedy: str) -> None:
        super().__init__(
            f"Input {argument!r} of {method} has the {what} {got}, but the program takes {expected}.",
            remedy,
            method=method, input=argument, what=what, expected=expected, got=got,
        )  # fmt: skip


class SizesDoNotFit(InputMismatch):
    """The sizes of inputs are not related as the method needs."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(
            f"The sizes of the inputs of {method} do not fit: {why}.",
            "Give sizes that fit; the exported model requires this.",
            method=method, input="", what="sizes", expected="", got=why,
        )  # fmt: skip


def check_inputs(method: str, facts: MethodFacts, values: Sequence[Value]) -> None:
    """Refuse inputs that the method would fail on, or would silently read wrongly.

    Args:
        method: the method's name for the message.
        values: leaves in flattened order; their names are ignored.

    Raises:
        CountMismatch: the number of values differs from the method's.
        SizesDoNotFit: their sizes break a relation.
        ValueMismatch: a value differs in kind, dtype, shape, dim order or baked-in value; the first such value is reported.
    """
    expected = facts.inputs
    if len(values) != len(expected):
        raise CountMismatch(method, [_name(fact, index) for index, fact in enumerate(expected)], len(values))
    for index, (fact, value) in enumerate(zip(expected, values, strict=True)):
        _check_value(method, _name(fact, index), fact, value)
    shapes = {
        _name(fact, index): value.shape
        for index, (fact, value) in enumerate(zip(expected, values, strict=True))
        if not isinstance(value, Scalar)
    }
    if broken := size_relations.find_broken(facts.relations, shapes):
        raise SizesDoNotFit(method, broken)


def _check_value(method: str, name: str, fact: ValueSpec, value: Value) -> None:
    if isinstance(value, Scalar) or fact.kind != common_pb2.VALUE_KIND_TENSOR:
        _check_scalar(method, name, fact, value)
        return
    if value.dtype != fact.dtype:
        remedy = f"Convert it, for example with array.astype({fact.dtype!r})."
        raise ValueMismatch(method, name, "dtype", fact.dtype, value.dtype, remedy)
    dims = fact.dims
    if len(dims) != len(value.shape) or not all(d.min <= n <= d.max for d, n in zip(dims, value.shape, strict=True)):
        dynamic = any(dim.min != dim.max for dim in dims)
        remedy = "Reshape or resize it." if dynamic else "Reshape it, or export the model with dynamic shapes."
        raise ValueMismatch(method, name, "shape", _format_dims(dims), str(list(value.shape)), remedy)
    order = list(fact.dim_order)
    if list(value.dim_order) != order and not _same_layout(value.shape, value.dim_order, order):
        remedy = "Give its bytes in that order: contiguous is 0, 1, 2, ..., channels last is 0, 2, 3, 1."
        raise ValueMismatch(method, name, "dim order", str(order), str(list(value.dim_order)), remedy)


def _check_scalar(method: str, name: str, fact: ValueSpec, value: Value) -> None:
    kind = "tensor" if not isinstance(value, Scalar) else _kind_of(value)
    wanted = word_of(common_pb2.ValueKind.DESCRIPTOR, fact.kind) or "none"
    if kind != wanted:
        expected, got = (_NAMES.get(known, known) for known in (wanted, kind))
        raise ValueMismatch(method, name, "kind", expected, got, f"Give a {expected}.")
    fixed = from_scalar(fact.value)  # None without one, and for an integer that no message can hold
    if isinstance(value, Scalar) and fixed is not None and value.value != fixed:
        remedy = f"The export fixed it: give the same value, or export again with the new one. {how_to_vary(kind)}".rstrip()
        raise ValueMismatch(method, name, "value", repr(fixed), repr(value.value), remedy)


def _kind_of(value: Scalar) -> str:
    if value.value is None:
        return "none"
    return next(kind for kind, python in _KINDS.items() if type(value.value) is python)


def _same_layout(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether two dim orders differ only in the position of dims of size 1, which does not move bytes."""
    return [d for d in first if shape[d] != 1] == [d for d in second if shape[d] != 1]


def _format_dims(dims: Iterable[DimRange]) -> str:
    return "[" + ", ".join(f"{dim.min}..{dim.max}" if dim.min != dim.max else str(dim.min) for dim in dims) + "]"


def _name(fact: ValueSpec, index: int) -> str:
    return fact.name or str(index)
