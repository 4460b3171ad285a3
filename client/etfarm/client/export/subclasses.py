"""Tensor subclasses among a model's weights, in the form of plain tensors, which an archive can contain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram


def has_subclasses(module: nn.Module) -> bool:
    """Return whether a parameter or buffer is made of other tensors, such as a weight that torchao has quantized."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return any(is_traceable_wrapper_subclass(tensor) for tensor in _tensors(module))


def unwrap(module: nn.Module) -> None:
    """Replace parameters and buffers that are made of other tensors by these, with a parametrization that puts them together.

    torchao's `unwrap_tensor_subclass` does the same for weights of nn.Linear and nn.Embedding below the root only.
    """
    from torch._functorch._aot_autograd.subclass_parametrization import unwrap_tensor_subclass_parameters

    before = set(module.modules())
    unwrap_tensor_subclass_parameters(module)
    for part in set(module.modules()) - before:
        part.training = False  # new modules start in train mode


def is_unwrapping(part: nn.Module) -> bool:
    """Return whether a module only puts tensors together again, which it does alike in train and in eval mode.

    Such modules start in train mode, so those that a factory itself unwraps remain in it.
    """
    from torch import nn

    if isinstance(part, nn.ModuleDict | nn.ModuleList) and len(part):  # what parametrize keeps them in
        return all(is_unwrapping(each) for each in part.children())
    return type(part).__name__ == "UnwrapTensorSubclass"


def make_plain(program: ExportedProgram) -> None:
    """Replace tensors of subclasses that only add methods by plain ones of the same memory: the graph no longer calls methods."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for tensors in (program.state_dict, program.constants):
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter):
                continue
            if is_traceable_wrapper_subclass(tensor):
                continue
            plain = tensor.detach().as_subclass(torch.Tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            tensors[name] = torch.nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
