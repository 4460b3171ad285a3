"""The reference outputs: the exported program, run by torch on the device's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etfarm.server.graphs import custom_operators, rounding
from etfarm.server.graphs.rounding import placeholder_values
from etfarm.server.workers.limits import limit_loading
from etfarm.wire import tensors
from etfarm.wire.errors import UserError
from etfarm.wire.shared_state import written_buffers
from etfarm.wire.tensors import Scalar, Tensor, Value

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

Observe = Callable[["Node", Any, tuple[Any, ...], dict[str, Any]], None]
"""A callback that takes a node, its value (tensors, tuples of them, numbers), and its positional and keyword arguments. Tensors
are only valid during the call, since a later node may write to them."""


class ReferenceNotRunnable(UserError):
    """An exported program that cannot be run on the device's inputs."""

    reason = "REFERENCE_NOT_RUNNABLE"


Screen = Callable[[Path], None]
"""A callback that raises a UserError for a .pt2 that must not be loaded."""


def load(model: Path, screen: Screen | None = None) -> ExportedProgram:
    """Return the program of a .pt2. Loading it executes code, so this must run in a jailed child.

    Only the layout that is screened when a model is compiled is supported; torch's older layouts are refused.

    Args:
        screen: checks the file first. It passed when it was compiled, possibly under an older version's rules.

    Raises:
        ReferenceNotRunnable: torch cannot read it, or it did not pass the screen.
    """
    with limit_loading(model):
        return _load(model, screen)


def _load(model: Path, screen: Screen | None) -> ExportedProgram:
    if screen is not None:
        try:
            screen(model)
        except UserError as error:
            raise ReferenceNotRunnable(error.message, error.remedy) from error
    import torchao  # noqa: F401 - registers its operators

    from etfarm.server.graphs.programs import read_program

    custom_operators.register()
    try:
        with model.open("rb") as file:  # a path would have to end in .pt2, which stored artifacts do not
            program: ExportedProgram = read_program(file)
            return program
    except Exception as error:  # torch raises many types for a bad archive: RuntimeError, KeyError, AttributeError, ...
        raise ReferenceNotRunnable(f"torch cannot load the model: {_first_line(error)}.", detail=_first_line(error)) from error


def run(program: ExportedProgram, samples: Iterable[Sequence[Value]]) -> Iterator[list[Value]]:
    """Yield the outputs of a program for each sample, flattened, named `0`, `1`, ...; tensors contiguous.

    Args:
        program: as `load` returns it.
        samples: the flattened leaves of (args, kwargs) of each; buffers start as exported.

    Raises:
        ReferenceNotRunnable: the inputs are not the program's, or torch refuses them.
    """
    import torch
    from torch.utils import _pytree as pytree

    module = program.module()
    held = {**program.constants, **program.state_dict}
    # Only what runs change: the weights of quantized programs are buffers as well.
    initial = [(held[name], held[name].clone()) for name in sorted(written_buffers(program)) if name in held]
    for inputs in samples:
        _check_count(program, inputs)
        args, kwargs = pytree.tree_unflatten([to_torch(value) for value in inputs], program.call_spec.in_spec)
        try:
            with torch.no_grad():
                result = module(*args, **kwargs)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            raise _refused(error) from error
        outputs = [from_torch(str(index), leaf) for index, leaf in enumerate(pytree.tree_leaves(result))]
        for buffer, value in initial:  # only now, since an output may be a buffer
            buffer.copy_(value)
        yield outputs


def run_in_half(program: ExportedProgram, inputs: Path, *, float32: bool) -> Iterator[list[Value]]:
    """Yield the outputs of runs with other rounding in half precision, as `rounding.run_in_half`."""
    for run in rounding.run_in_half(program, read_inputs(inputs), float32=float32):
        yield [from_torch(str(index), leaf) for index, leaf in enumerate(run)]


def run_nodes(program: ExportedProgram, inputs: Sequence[Value], observe: Observe) -> None:
    """Run a program node by node; buffers start as exported and are not modified.

    Args:
        inputs: the flattened leaves of (args, kwargs).
        observe: called after each node that computes a value.

    Raises:
        ReferenceNotRunnable: the inputs are not the program's, or torch refuses them.
    """
    import torch

    class Observed(torch.fx.Interpreter):  # type: ignore[misc]
        def run_node(self, n: Node) -> Any:
            try:
                result = super().run_node(n)
            except (RuntimeError, AssertionError, ValueError, TypeError) as error:
                raise _refused(error) from error
            if n.op in ("call_function", "placeholder"):
                observe(n, result, *self.fetch_args_kwargs_from_env(n))
            return result

    _check_count(program, inputs)
    arguments = list(placeholder_values(program, [to_torch(value) for value in inputs]))
    with torch.no_grad():
        Observed(program.graph_module).run(*arguments, enable_io_processing=False)


def _check_count(program: ExportedProgram, inputs: Sequence[Value]) -> None:
    spec = program.call_spec.in_spec
    if spec is None or spec.num_leaves != len(inputs):
        wanted = 0 if spec is None else spec.num_leaves
        raise ReferenceNotRunnable(
            f"The model takes {wanted} inputs, but was run with {len(inputs)}.", inputs=len(inputs), expected=wanted
        )


def _refused(error: Exception) -> ReferenceNotRunnable:
    first = _first_line(error)
    return ReferenceNotRunnable(f"torch cannot run the model on these inputs: {first}.", detail=first)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def read_inputs(file: Path) -> list[Any]:
    """Return the values of a tensor file as torch's."""
    return [to_torch(value) for value in tensors.decode(file.read_bytes())]


def to_torch(value: Value) -> Any:
    """Return a value as a torch tensor with its dim order, or as a Python scalar."""
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
    """Return a leaf of torch's outputs as a value.

    Raises:
        BadTensorFile: the dtype is not supported by etfarm, such as complex64.
        ReferenceNotRunnable: the leaf is neither a tensor nor a number.
    """
    import torch

    if isinstance(leaf, torch.Tensor):
        whole = leaf.detach().contiguous()
        data = bytes(whole.reshape(-1).view(torch.uint8).numpy().data) if whole.numel() else b""
        return Tensor(name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), data)
    if leaf is None or isinstance(leaf, bool | int | float):
        return Scalar(name, leaf)
    raise ReferenceNotRunnable(f"The model's output {name} is a {type(leaf).__name__}, which cannot be compared.", output=name)
