"""Language models on this host, token by token: exported programs in torch, and programs in ExecuTorch. For children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etfarm.server.graphs import custom_operators
from etfarm.server.reports.numerics.reference import ReferenceNotRunnable, Screen, load
from etfarm.server.reports.request import TokenInputs

_Floats = NDArray[np.float64]


class EagerModel:
    """An exported program, run by torch. Loading it executes code: see `reference.load`.

    Args:
        model: a .pt2 whose buffers are the KV cache.
        inputs: how it takes tokens.
        screen: as in `reference.load`.

    Raises:
        ReferenceNotRunnable: torch cannot read it, or it has other inputs.
    """

    def __init__(self, model: Path, inputs: TokenInputs, screen: Screen | None) -> None:
        program = load(model, screen)
        self._spec, self._inputs = program.call_spec.in_spec, inputs
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        leaves = [values[name] for name in program.graph_signature.user_inputs if isinstance(name, str) and name in values]
        if self._spec is None or len(leaves) != 2 or self._spec.num_leaves != 2:
            raise ReferenceNotRunnable("The model's inputs are not tokens and their position.")
        self._dtypes = [leaf.dtype for leaf in leaves]
        self.longest = inputs.longest
        self._module = program.module()
        self._start = {name: buffer.clone() for name, buffer in self._module.named_buffers()}

    def reset(self) -> None:
        """Restore the buffers as exported."""
        for name, buffer in self._module.named_buffers():
            buffer.copy_(self._start[name])

    def execute(self, tokens: list[int], position: int) -> _Floats:
        """Execute tokens and return the logits after the last one.

        Raises:
            ReferenceNotRunnable: torch refuses them.
        """
        import torch
        from torch.utils import _pytree as pytree

        args, kwargs = pytree.tree_unflatten(_tensors(tokens, position, self._inputs, self._dtypes), self._spec)
        try:
            with torch.no_grad():
                outputs = pytree.tree_leaves(self._module(*args, **kwargs))
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            raise _refused("torch cannot run the model on tokens", error) from error
        return _last_row(outputs)


class HostModel:
    """A program, run by ExecuTorch's Python binding.

    Raises:
        ReferenceNotRunnable: ExecuTorch cannot load it here.
    """

    def __init__(self, pte: Path, method: str, inputs: TokenInputs) -> None:
        import torch
        from executorch.runtime import Runtime, Verification

        custom_operators.register()
        self._name, self._inputs = method, inputs
        self._dtypes = [torch.int32 if name == "int32" else torch.int64 for name in inputs.dtypes]
        self.longest = inputs.longest
        try:
            self._program = Runtime.get().load_program(pte, verification=Verification.InternalConsistency)
            self._method: Any = self._program.load_method(method)
        except (RuntimeError, ValueError) as error:
            raise _refused("ExecuTorch cannot load the program on the server", error) from error

    def reset(self) -> None:
        """Load the method again."""
        self._method = self._program.load_method(self._name)

    def execute(self, tokens: list[int], position: int) -> _Floats:
        """Execute tokens and return the logits after the last one.

        Raises:
            ReferenceNotRunnable: ExecuTorch refuses them.
        """
        try:
            outputs = self._method.execute(_tensors(tokens, position, self._inputs, self._dtypes))
        except (RuntimeError, ValueError, TypeError) as error:
            raise _refused("ExecuTorch cannot run the program on the server", error) from error
        return _last_row(outputs)


def _tensors(tokens: list[int], position: int, inputs: TokenInputs, dtypes: list[Any]) -> list[Any]:
    import torch

    positions = list(range(position, position + len(tokens))) if inputs.takes_each_position else [position]
    values: list[Any] = [None, None]
    values[inputs.token_input] = torch.tensor([tokens], dtype=dtypes[inputs.token_input])
    values[inputs.position_input] = torch.tensor(positions, dtype=dtypes[inputs.position_input])
    return values


def _last_row(outputs: Any) -> _Floats:
    logits = outputs[0]
    return np.asarray(logits.reshape(-1, logits.shape[-1])[-1].double().numpy().copy())


def _refused(what: str, error: Exception) -> ReferenceNotRunnable:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ReferenceNotRunnable(f"{what}: {first}.", detail=first)
