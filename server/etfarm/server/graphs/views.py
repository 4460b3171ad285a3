"""Operators of an exported graph that give elements of their input as they are. Does not import torch before it moves some."""

from __future__ import annotations

from typing import Any, Final

VIEWS: Final = frozenset(
    {"t", "numpy_T", "permute", "transpose", "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
     "select", "slice", "contiguous", "clone", "alias", "detach", "to", "_to_copy"}
)  # fmt: skip
"""Operators that give the elements of their input, or some of them, as they are."""


class UnknownSize(Exception):
    """A size depends on values."""


def name_of(node: Any) -> str:
    """Return a node's operator without namespace and overload, like `linear` for aten.linear.default."""
    return str(getattr(node, "target", "")).removeprefix("aten.").partition(".")[0]


def is_view(node: Any) -> bool:
    """Return whether a node is one of `VIEWS`, and not a view of the same bits as another dtype."""
    return name_of(node) in VIEWS and node.op == "call_function" and str(node.target) != "aten.view.dtype"


def shape_of(node: Any) -> list[int]:
    """Return the shape of a node's value at the example inputs.

    Raises:
        UnknownSize: a size depends on values.
    """
    return [_hint(size) for size in node.meta["val"].shape]


def move(node: Any, numbers: Any) -> Any:
    """Return what a view gives at the example inputs for a tensor of numbers in place of its input, which says where each goes.

    Raises:
        UnknownSize: a size depends on values.
    """
    from torch.fx.node import map_arg

    if name_of(node) in ("to", "_to_copy"):  # of another dtype, which has not all numbers
        return numbers
    arguments, keywords = map_arg((node.args[1:], node.kwargs), lambda size: _hint(size.meta["val"]))
    return numbers.reshape(*arguments) if name_of(node) == "view" else node.target(numbers, *arguments, **keywords)


def _hint(size: Any) -> Any:
    symbol = getattr(size, "node", None)
    known = size if symbol is None else symbol.hint
    if known is None:
        raise UnknownSize
    return known
