"""Dtypes and shapes of inputs, compared with those that a model takes, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from etfarm.client.errors import UserError
from etfarm.wire.tensors import Tensor, Value

if TYPE_CHECKING:
    from etfarm.wire.pt2 import InputType


class InputMismatch(UserError):
    """An input's dtype or shape is not what the model takes."""

    reason = "INPUT_MISMATCH"

    def __init__(self, method: str, name: str, got: str, expected: InputType) -> None:
        super().__init__(
            f"Input {name!r} of {method} is {got}, but the model takes {expected}.",
            "Reshape it, or give example inputs of its shape."
            if got.startswith(f"{expected.dtype} ")
            else f"Convert it, for example with array.astype({expected.dtype!r}).",
            method=method, input=name, got=got, expected=str(expected),
        )  # fmt: skip


def find_mismatches(values: Sequence[Value], types: Sequence[InputType | None]) -> Iterator[tuple[Value, str, InputType]]:
    """Yield (value, its type in words, the expected type) for each value that is not what a method takes.

    Args:
        values: in flattened order.
        types: parallel to `values`; None, or fewer than values, where they are unknown.
    """
    for value, wanted in zip(values, types, strict=False):
        if wanted is None:
            continue
        if not isinstance(value, Tensor):
            yield value, repr(value.value), wanted
        elif value.dtype != wanted.dtype or not _is_of_sizes(value.shape, wanted.sizes):
            yield value, f"{value.dtype} {list(value.shape)}", wanted


def _is_of_sizes(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    return len(shape) == len(sizes) and all(want in (None, size) for size, want in zip(shape, sizes, strict=True))


def require_fitting(method: str, values: Sequence[Value], types: Sequence[InputType | None]) -> None:
    """Check the inputs of a method.

    Raises:
        InputMismatch: one has another dtype or shape; the first one is named.
    """
    for value, got, wanted in find_mismatches(values, types):
        raise InputMismatch(method, value.name, got, wanted)
