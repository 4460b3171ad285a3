"""Conversion between wire values and torch tensors, as leaves in flattened pytree order. For children."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from etfarm.wire.output_names import names_of_structure
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Tensor, Value

Leaf = Any
"""A torch.Tensor, bool, int, float, str or None."""


def to_leaf(value: Value) -> Leaf:
    """Return the torch tensor, in the value's memory order, or the plain Python value."""
    if isinstance(value, Scalar):
        return value.value
    dtype = getattr(torch, value.dtype)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    physical = torch.frombuffer(bytearray(value.data), dtype=dtype).reshape([value.shape[d] for d in value.dim_order])
    if not value.shape:
        return physical.reshape(())
    inverse = sorted(range(len(value.shape)), key=lambda logical: value.dim_order[logical])
    return physical.permute(inverse)


def to_value(name: str, leaf: Any) -> Value:
    """Return the wire value of a tensor or plain Python value; a tensor keeps its dim order.

    Raises:
        BadTensorFile: etfarm does not support the tensor's dtype.
        TypeError: the leaf is neither a tensor nor a bool, int, float or None.
    """
    if not isinstance(leaf, torch.Tensor):
        if leaf is not None and not isinstance(leaf, bool | int | float):
            raise TypeError(f"{name!r} is a {type(leaf).__name__}, which cannot be sent")
        return Scalar(name, leaf)
    tensor = leaf.detach().cpu()
    order = tuple(tensor.dim_order()) if tensor.dim() else ()
    physical = tensor.permute(order).contiguous() if order else tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = physical.reshape(-1).view(torch.uint8).numpy().tobytes() if physical.numel() else b""
    if dtype in ITEM_BYTES and len(data) != physical.numel() * ITEM_BYTES[dtype]:
        raise TypeError(f"{name!r} of {dtype} has {len(data)} bytes")
    return Tensor(name, dtype, tuple(tensor.shape), data, order)


def to_arguments(program: Any, leaves: Sequence[Leaf]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of an exported program for leaves in flattened order."""
    args, kwargs = pytree.tree_unflatten(list(leaves), program.call_spec.in_spec)
    return args, kwargs


def input_names(program: Any) -> list[str]:
    """Return the names of an exported program's inputs in flattened order, like `x` and `options_mask`."""
    return [s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]


def output_names(program: Any) -> list[str]:
    """Return the names of an exported program's outputs in flattened order; see `etfarm.wire.output_names`."""
    count = sum(spec.kind.name == "USER_OUTPUT" for spec in program.graph_signature.output_specs)
    structure = program.call_spec.out_spec
    if structure is None or structure.num_leaves != count:
        return [str(place) for place in range(count)]
    return list(names_of_structure(pytree.treespec_dumps(structure)))


def example_values(program: Any) -> list[Value] | None:
    """Return the example inputs of a .pt2, flattened and named; None if it has none."""
    if not program.example_inputs:
        return None
    leaves = pytree.tree_leaves(program.example_inputs)
    return [to_value(name, leaf) for name, leaf in zip(input_names(program), leaves, strict=True)]
