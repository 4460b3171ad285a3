"""Example and calibration inputs as flat wire values, and their validation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etfarm.client.export.errors import UnsupportedInput, calibration_mismatch, with_article
from etfarm.client.export.structures import to_plain
from etfarm.wire.tensors import ITEM_BYTES, Scalar, Tensor, Value


def flat_values(method: str, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[Value]:
    """Return the inputs in the wire's order, `tree_leaves((args, kwargs))`, with the names in `names`.

    A tensor keeps its memory format as dim order (channels_last is (0, 2, 3, 1)); one whose elements are not dense in
    any order, such as a slice or an expanded one, becomes contiguous.

    Raises:
        UnsupportedInput: a leaf is neither a dense CPU tensor of a supported dtype nor a bool, int, float or None.
    """
    leaves = input_leaves(args, kwargs)
    return [wire_value(method, name, leaf) for name, leaf in zip(names, leaves, strict=True)]


def input_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the leaves of all inputs in the wire's order.

    None is a leaf.
    """
    from torch.utils import _pytree as pytree

    return list(pytree.tree_leaves((args, dict(kwargs or {}))))


def leaf_names(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of leaves in errors before a program has named them: `0`, `1[0]`, `mask`."""
    from torch.utils import _pytree as pytree

    names = []
    for path, _ in pytree.tree_flatten_with_path(to_plain((args, dict(kwargs or {}))))[0]:
        first = str(getattr(path[1], "key", getattr(path[1], "idx", path[1])))
        names.append(first + pytree.keystr(path[2:]))
    return names


def wire_value(method: str, name: str, leaf: Any) -> Value:
    """Convert one leaf to a wire value.

    Raises:
        UnsupportedInput: see `flat_values`.
    """
    import torch

    if leaf is None or isinstance(leaf, bool | int | float):
        return Scalar(name, leaf)
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may store its elements elsewhere
        raise UnsupportedInput(
            method,
            name,
            with_article(type(leaf).__name__),
            "Inputs are tensors, bools, ints, floats, None, and tuples, lists and dicts of these; register another container "
            "with torch.export.register_dataclass, and keep anything else in the module.",
        )
    dtype = str(leaf.dtype).removeprefix("torch.")
    if leaf.is_quantized or dtype not in ITEM_BYTES:
        what = f"of the dtype {dtype}"
        remedy = (
            "Give its real and imaginary parts, as torch.view_as_real returns them."
            if leaf.is_complex()
            else f"The dtypes are {', '.join(ITEM_BYTES)}."
        )
        raise UnsupportedInput(method, name, what, remedy)
    if leaf.layout != torch.strided:
        raise UnsupportedInput(method, name, f"of the layout {leaf.layout}", "Call .to_dense() on it.")
    tensor = leaf.detach().resolve_conj().resolve_neg().cpu()
    order = _dim_order(tensor)
    dense = tensor.permute(order).contiguous().reshape(-1)
    return Tensor(name, dtype, tuple(tensor.shape), dense.view(torch.uint8).numpy().tobytes(), order)


def must_match(method: str, sample: int, example: tuple[Any, ...], inputs: tuple[Any, ...], names: Sequence[str]) -> None:
    """Check that a calibration sample fits the example inputs.

    Sizes of dims may differ, for dynamic shapes.

    Raises:
        CALIBRATION_MISMATCH: the structure, dtype, rank or a constant differs.
    """
    if difference := find_mismatch(example, inputs, names):
        raise calibration_mismatch(method, sample, difference)


def ordered_like(example: Any, inputs: Any) -> Any:
    """Return inputs with the keys of their dicts in the order of the example's, where these have the same keys."""
    if type(example) is not type(inputs):
        return inputs
    if type(example) in (dict, OrderedDict) and example.keys() == inputs.keys():
        return type(inputs)((key, ordered_like(value, inputs[key])) for key, value in example.items())
    if type(example) in (list, tuple) and len(example) == len(inputs):
        return type(example)(map(ordered_like, example, inputs))
    return inputs


def find_mismatch(example: tuple[Any, ...], inputs: tuple[Any, ...], names: Sequence[str]) -> str:
    """Return how inputs differ from the example inputs in structure, dtype, rank or a constant; empty if they do not."""
    import torch
    from torch.utils import _pytree as pytree

    (wanted, wanted_spec), (got, got_spec) = pytree.tree_flatten(example), pytree.tree_flatten(inputs)
    if wanted_spec != got_spec:
        return f"{len(got)} values in another structure than {len(wanted)}"
    for name, a, b in zip(names, wanted, got, strict=False):  # names continue with the keyword arguments
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                return f"{name!r} is {_shown(b)}, not {_shown(a)}"
        elif a.dtype != b.dtype or a.dim() != b.dim():
            return f"{name!r} is {_shown(b)}, not {_shown(a)}"
    return ""


def unshared(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same inputs, with a separate tensor for each argument.

    torch.export(strict=False) identifies inputs by identity: for `(x, x)` it uses the last for both, and the program
    silently ignores the first.
    """
    import torch
    from torch.utils import _pytree as pytree

    seen: set[int] = set()

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) in seen:
                return leaf.detach().clone()
            seen.add(id(leaf))
        return leaf

    own_args, own_kwargs = pytree.tree_map(fresh, (args, dict(kwargs)))
    return own_args, own_kwargs


def dense(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the same inputs, with a contiguous copy of each tensor that is neither contiguous nor channels-last.

    Such are expanded and transposed tensors and slices, whose strides ExecuTorch does not support. The program receives dense
    tensors in any case. Tensors that are contiguous in several orders, such as channels-last ones with one channel, get the
    strides of new ones, since ExecuTorch takes their order from the strides.

    Args:
        names: the leaves' names.
        say: called with a sentence for each copy.
    """
    import torch
    from torch.utils import _pytree as pytree

    remaining = iter(names)

    def copied(leaf: Any) -> Any:
        name = next(remaining, "")
        if type(leaf) is not torch.Tensor or leaf.layout != torch.strided:
            return leaf
        if leaf.is_contiguous():
            usual = leaf.stride() == torch.empty(leaf.shape, device="meta").stride()
            return leaf if usual or leaf.numel() == 0 else leaf.detach().clone(memory_format=torch.contiguous_format)
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(leaf.dim())
        if channels_last is not None and leaf.is_contiguous(memory_format=channels_last):
            return leaf
        say(f"The example input {name!r} is not contiguous in memory (strides {leaf.stride()}): a contiguous copy is exported.")
        return leaf.detach().contiguous()

    own_args, own_kwargs = pytree.tree_map(copied, (args, dict(kwargs)))
    return own_args, own_kwargs


def _dim_order(tensor: Any) -> tuple[int, ...]:
    """Return the dims, outermost first, by stride.

    If the elements are not dense or the order is ambiguous, the dims keep their order.
    """
    natural = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return natural
    order = tuple(sorted(natural, key=lambda d: (-tensor.stride(d), d)))
    return order if tensor.permute(order).is_contiguous() else natural


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{value.dtype} {list(shape)}" if shape is not None else repr(value)
