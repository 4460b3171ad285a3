"""Weights of layers that a forward uses otherwise than the layers do, such as a decoder with its encoder's weight transposed."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def find_other_uses(module: nn.Module, layers: Collection[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return the layers whose weights an operator other than linear takes; none if the module does not run without data.

    Each layer has a weight of its own while a copy of the module runs, so that tied weights are told apart.

    Args:
        layers: the paths of layers that have weights.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils import _pytree as pytree

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    own = copy.deepcopy(module, {id(each): mode.from_tensor(each) for each in (*module.parameters(), *module.buffers())})
    weights: dict[int, str] = {}
    for path in layers:
        layer = own.get_submodule(path)
        layer._parameters["weight"] = weight = layer.weight.detach()
        weights[id(weight)] = path
    used: dict[str, None] = {}

    class Uses(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            makes_tensors = any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(result))
            if func is not torch.nn.functional.linear and makes_tensors:
                used.update((weights[id(each)], None) for each in pytree.tree_leaves((args, kwargs)) if id(each) in weights)
            return result

    inputs, options = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, dict(kwargs)))
    try:
        with torch.no_grad(), mode, Uses():
            own(*inputs, **options)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return []
    return list(used)
