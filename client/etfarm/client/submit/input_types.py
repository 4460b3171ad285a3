"""Dtypes and shapes of inputs, compared with those that a model takes, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from etfarm.client.errors import UserError
from etfarm.wire import size_relations
from etfarm.wire.tensors import Tensor, Value

if TYPE_CHECKING:
    from etfarm.wire.pt2 import InputType


_RESHAPE: Final = "Reshape it, or give example inputs of its shape."
_RESIZE: Final = "Give it sizes in these ranges, or export the model with other dynamic shapes."


class InputMismatch(UserError):
    """Inputs are not what the model takes."""

    reason = "INPUT_MISMATCH"


class ValueMismatch(InputMismatch):
    """An input's dtype or shape is not what the model takes."""

    def __init__(self, method: str, name: str, got: str, expected: InputType) -> None:
        super().__init__(
            f"Input {name!r} of {method} is {got}, but the model takes {expected}.",
            (_RESIZE if ".." in str(expected) else _RESHAPE)
            if got.startswith(f"{expected.dtype} ")
            else f"Convert it, for example with array.astype({expected.dtype!r}).",
            method=method, input=name, got=got, expected=str(expected),
        )  # fmt: skip


class CountMismatch(InputMismatch):
    """The number of inputs is not the method's."""

    def __init__(self, method: str, count: int, names: Sequence[str], got: int) -> None:
        listed = "" if all(name.isdecimal() for name in names) else f" ({', '.join(names)})"
        super().__init__(
            f"{method} takes {count or 'no'} input{'' if count == 1 else 's'}{listed}, got {got or 'none'}.",
            "Give a value for each input, in their order." if count else "Give none.",
            method=method, expected=str(count), got=got,
        )  # fmt: skip


class SizesDoNotFit(InputMismatch):
    """The sizes of inputs are not related as the model needs."""

    def __init__(self, method: str, why: str) -> None:
        super().__init__(
            f"The sizes of the inputs of {method} do not fit: {why}.",
            "Give sizes that fit; the exported model requires this.",
            method=method, got=why,
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


def _is_of_sizes(shape: Sequence[int], sizes: Sequence[int | tuple[int, int] | None]) -> bool:
    return len(shape) == len(sizes) and all(map(_is_of_size, shape, sizes))


def _is_of_size(size: int, wanted: int | tuple[int, int] | None) -> bool:
    return wanted[0] <= size <= wanted[1] if isinstance(wanted, tuple) else wanted in (None, size)


def require_count(method: str, names: Sequence[str], count: int, values: Sequence[Value]) -> None:
    """Raise CountMismatch unless there is a value for each of a method's inputs; `names` are theirs as far as known."""
    if len(values) != count:
        raise CountMismatch(method, count, names, len(values))


def require_fitting(
    method: str,
    values: Sequence[Value],
    types: Sequence[InputType | None],
    relations: Sequence[str] = (),
    *,
    is_program: bool = False,
) -> None:
    """Check the inputs of a method.

    Args:
        relations: relations between their sizes, see `etfarm.wire.size_relations`.
        is_program: whether they are the inputs of a compiled program of the model. Only the device can compare their dtypes then,
            since a recipe may have changed those of the program.

    Raises:
        InputMismatch: one has another dtype or shape; the first one is named.
        SizesDoNotFit: their sizes break a relation.
    """
    if is_program:
        types = [
            replace(wanted, dtype=value.dtype) if wanted is not None and isinstance(value, Tensor) else None
            for wanted, value in zip(types, values, strict=False)
        ]
    for value, got, wanted in find_mismatches(values, types):
        raise ValueMismatch(method, value.name, got, wanted)
    shapes = {value.name: value.shape for value in values if isinstance(value, Tensor)}
    if broken := size_relations.find_broken(relations, shapes):
        raise SizesDoNotFit(method, broken)
