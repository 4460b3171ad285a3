"""Checks of a module and its example inputs before torch.export, which would fail with less clear messages, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etfarm.client.export.errors import STAGE, BadModel, UnsupportedInput
from etfarm.client.export.samples import input_leaves, leaf_names
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from torch import nn


def must_be_exportable(method: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check that a module is one of Python, and that weights and inputs are tensors on the CPU.

    Raises:
        BadModel: it is a module of TorchScript.
        UnsupportedInput: an input is an array of NumPy.
        MODEL_NOT_ON_CPU: a weight or input is elsewhere.
    """
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        raise BadModel(
            f"{method}: the model is a module of TorchScript, which torch.export does not take.",
            "Give the module of Python that was given to torch.jit.script or torch.jit.trace.",
            method=method,
        )
    names = leaf_names(args, kwargs)
    inputs = list(zip(names, input_leaves(args, kwargs), strict=False))
    for name, leaf in inputs:
        if type(leaf).__module__ == "numpy" and not isinstance(leaf, int | float):
            is_array = type(leaf).__name__ == "ndarray"
            remedy = "Give torch.from_numpy(...) of it." if is_array else "Give a number of Python, as its .item() returns."
            raise UnsupportedInput(method, name, "an array of NumPy" if is_array else "a number of NumPy", remedy)
    weights = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in [*weights, *((f"input {name}", leaf) for name, leaf in inputs)]:
        device = getattr(tensor, "device", None)
        if device is not None and device.type != "cpu":
            raise error_for(
                "MODEL_NOT_ON_CPU",
                f"{method}: {name} is on {str(device)!r}; programs are exported on the CPU.",
                "Call .cpu() on the module and on its inputs, or load real weights where it is 'meta'.",
                stage=STAGE,
                method=method,
                tensor=name,
                device=str(device),
            )
