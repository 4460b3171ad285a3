"""Step 9, in the jailed child: what the model itself gives for the device's inputs, run by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etfarm.wire.errors import UserError
from etfarm.wire.tensors import Scalar, Tensor, Value


class ReferenceNotRunnable(UserError):
    """The exported program cannot be run on the inputs that the device got."""

    reason = "REFERENCE_NOT_RUNNABLE"


def run(model: Path, inputs: list[Value]) -> list[Value]:
    """The outputs of an exported program, flattened, named `0`, `1`, ...; tensors contiguous.

    Args:
        model: a .pt2. Loading it executes code: only in a jailed child, and only when it was screened.
        inputs: the flattened leaves of (args, kwargs).

    Raises:
        ReferenceNotRunnable: the inputs are not the program's, or torch refuses them.
    """
    import torch
    from torch.utils import _pytree as pytree

    with model.open("rb") as file:  # by its path it would have to end in .pt2, and stored artifacts do not
        program = torch.export.load(file)
    spec = program.call_spec.in_spec
    if spec is None or spec.num_leaves != len(inputs):
        wanted = 0 if spec is None else spec.num_leaves
        raise ReferenceNotRunnable(
            f"The model takes {wanted} inputs and was run with {len(inputs)}.", inputs=len(inputs), expected=wanted
        )
    args, kwargs = pytree.tree_unflatten([to_torch(value) for value in inputs], spec)
    try:
        with torch.no_grad():
            result = program.module()(*args, **kwargs)
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ReferenceNotRunnable(f"torch cannot run the model on these inputs: {first}.", detail=first) from error
    return [from_torch(str(index), leaf) for index, leaf in enumerate(pytree.tree_leaves(result))]


def to_torch(value: Value) -> Any:
    """A value as torch takes it: a tensor with the value's dim order, or a Python scalar."""
    import numpy as np
    import torch

    if isinstance(value, Scalar):
        return value.value
    dtype = getattr(torch, value.dtype)
    physical = [value.shape[dim] for dim in value.dim_order]
    if 0 in physical:
        return torch.empty(value.shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(value.data), dtype=dtype)
    return flat.reshape(physical).permute(np.argsort(value.dim_order).tolist())


def from_torch(name: str, leaf: Any) -> Value:
    """A leaf of torch's outputs as a value.

    Raises:
        BadTensorFile: a dtype that etfarm does not carry, such as complex64.
        ReferenceNotRunnable: neither a tensor nor a number.
    """
    import torch

    if isinstance(leaf, torch.Tensor):
        whole = leaf.detach().contiguous()
        data = bytes(whole.reshape(-1).view(torch.uint8).numpy().data) if whole.numel() else b""
        return Tensor(name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), data)
    if leaf is None or isinstance(leaf, bool | int | float):
        return Scalar(name, leaf)
    raise ReferenceNotRunnable(f"The model's output {name} is a {type(leaf).__name__}, which cannot be compared.", output=name)
