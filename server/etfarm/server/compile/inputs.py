"""The check that inputs fit a method, before anything is sent to a device. Standard library only: also runs in the daemon."""

from __future__ import annotations

from collections.abc import Sequence

from etfarm.server.compile.result import DimRange, MethodFacts, ValueFacts
from etfarm.wire import size_relations
from etfarm.wire.errors import UserError
from etfarm.wire.fixed_numbers import how_to_vary
from etfarm.wire.tensors import Layout, Scalar, Tensor

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
    expected = facts["inputs"]
    if len(values) != len(expected):
        raise CountMismatch(method, [_name(fact, index) for index, fact in enumerate(expected)], len(values))
    for index, (fact, value) in enumerate(zip(expected, values, strict=True)):
        _check_value(method, _name(fact, index), fact, value)
    shapes = {
        _name(fact, index): value.shape
        for index, (fact, value) in enumerate(zip(expected, values, strict=True))
        if not isinstance(value, Scalar)
    }
    if broken := size_relations.find_broken(facts.get("relations", ()), shapes):
        raise SizesDoNotFit(method, broken)


def _check_value(method: str, name: str, fact: ValueFacts, value: Value) -> None:
    if isinstance(value, Scalar) or fact["kind"] != "tensor":
        _check_scalar(method, name, fact, value)
        return
    if value.dtype != fact["dtype"]:
        remedy = f"Convert it, for example with array.astype({fact['dtype']!r})."
        raise ValueMismatch(method, name, "dtype", str(fact["dtype"]), value.dtype, remedy)
    dims = fact["dims"] or []
    if len(dims) != len(value.shape) or not all(_fits(d, n) for d, n in zip(dims, value.shape, strict=True)):
        dynamic = any(isinstance(dim, dict) for dim in dims)
        remedy = "Reshape or resize it." if dynamic else "Reshape it, or export the model with dynamic shapes."
        raise ValueMismatch(method, name, "shape", _format_dims(dims), str(list(value.shape)), remedy)
    order = fact["dim_order"]
    if order is not None and list(value.dim_order) != list(order) and not _same_layout(value.shape, value.dim_order, order):
        remedy = "Give its bytes in that order: contiguous is 0, 1, 2, ..., channels last is 0, 2, 3, 1."
        raise ValueMismatch(method, name, "dim order", str(list(order)), str(list(value.dim_order)), remedy)


def _check_scalar(method: str, name: str, fact: ValueFacts, value: Value) -> None:
    kind = "tensor" if not isinstance(value, Scalar) else _kind_of(value)
    if kind != fact["kind"]:
        expected, got = (_NAMES.get(known, known) for known in (fact["kind"], kind))
        raise ValueMismatch(method, name, "kind", expected, got, f"Give a {expected}.")
    if isinstance(value, Scalar) and "value" in fact and value.value != fact["value"]:
        remedy = f"The export fixed it: give the same value, or export again with the new one. {how_to_vary(kind)}".rstrip()
        raise ValueMismatch(method, name, "value", repr(fact["value"]), repr(value.value), remedy)


def _kind_of(value: Scalar) -> str:
    if value.value is None:
        return "none"
    return next(kind for kind, python in _KINDS.items() if type(value.value) is python)


def _fits(dim: int | DimRange, size: int) -> bool:
    return dim == size if isinstance(dim, int) else dim["min"] <= size <= dim["max"]


def _same_layout(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether two dim orders differ only in the position of dims of size 1, which does not move bytes."""
    return [d for d in first if shape[d] != 1] == [d for d in second if shape[d] != 1]


def _format_dims(dims: Sequence[int | DimRange]) -> str:
    return "[" + ", ".join(str(d) if isinstance(d, int) else f"{d['min']}..{d['max']}" for d in dims) + "]"


def _name(fact: ValueFacts, index: int) -> str:
    return fact["name"] or str(index)
