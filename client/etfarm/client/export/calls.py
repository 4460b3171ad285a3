"""Calls of a model in eager mode, for comparisons, which leave it as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.attributes import is_same
from etfarm.client.export.noise import quiet

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOLERANCE: Final = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Maximum difference by dtype, relative to the largest value."""
_NAMED: Final = 8
"""Maximum number of outputs in a sentence."""
_FEW_ELEMENTS: Final = 1 << 18
_SEED: Final = 20_261_129
"""Not one that users or a factory's process take: an export that kept a random number is to differ."""


@contextmanager
def tensors_kept(module: nn.Module, others: tuple[Tensor, ...] = ()) -> Iterator[None]:
    """Put back the buffers of a module, and what is written into them and into other tensors."""
    held = [(part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    held = [(buffers, name, buffer) for buffers, name, buffer in held if buffer is not None]
    with values_kept((*(buffer for _, _, buffer in held), *others)):
        try:
            yield
        finally:
            for buffers, name, buffer in held:
                buffers[name] = buffer


@contextmanager
def values_kept(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put back what is written into tensors."""
    import torch

    distinct = {id(tensor): tensor for tensor in tensors}.values()
    before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in distinct if not tensor.is_inference()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values, version in before:
                if tensor._version != version:
                    tensor.copy_(values)


def outputs_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return copies of the values that a call returns in flattened order, without its warnings and with equal random numbers.

    Calls take the path that an export takes, which has gradients, as far as that changes values.
    """
    import torch
    from torch.utils import _pytree as pytree

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    own_args, own_kwargs = _copied_inputs((args, kwargs))
    with _equal_random_numbers(), torch.no_grad(), without_nested_tensors(), quiet():
        return [copied(leaf) for leaf in pytree.tree_leaves(function(*own_args, **own_kwargs))]


def _copied_inputs(inputs: Any) -> Any:
    """Return a copy of inputs, whose objects keep attributes that are no leaves. Tensors share memory as in the inputs."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(inputs)
    # Results of operators cannot be copied with their gradients.
    detached = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    memo: dict[int, Any] = {}
    copies = copy.deepcopy(detached, memo)
    memo |= {id(leaf): each for leaf, each in zip(leaves, copies, strict=True) if isinstance(leaf, torch.Tensor)}
    _share_uncopied(inputs, memo, set())
    return copy.deepcopy(inputs, memo)


def _share_uncopied(value: Any, memo: dict[int, Any], visited: set[int]) -> None:
    """Let copies share the parts of a value that cannot be copied, such as a lock."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, ModuleType):
        memo[id(value)] = value
    if _is_copied(value, memo):
        return
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in (*elements, *getattr(value, "__dict__", {}).values()):
        _share_uncopied(part, memo, visited)
    if not _is_copied(value, memo):
        memo[id(value)] = value


def _is_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the class is the user's
        return False
    return True


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Compute with one thread if tensors have few elements: those of OpenMP wait busily, longer than such operators take."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if elements <= _FEW_ELEMENTS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_nested_tensors() -> Iterator[None]:
    """Let encoders of torch compute padding like the rest, as with gradients; else they return zeros or fewer rows for it."""
    import torch

    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


@contextmanager
def _equal_random_numbers() -> Iterator[None]:
    """Seed the generators of torch, Python and NumPy, and put them back."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def difference_of(actual: list[Any], expected: list[Any], names: Sequence[str] = ()) -> str:
    """Return which outputs differ beyond rounding, as the end of a sentence about `actual`; empty if none does.

    Args:
        names: the outputs' names; their positions by default.
    """
    if len(actual) != len(expected):
        return f"has {len(actual)} outputs in place of {len(expected)}"
    places = [str(place) for place in range(len(actual))]
    known = list(names) if len(names) == len(actual) else places
    differing = [
        f"{'the output' if known == ['0'] else f'output {name}'} {difference}"
        for name, one, other in zip(known, actual, expected, strict=True)
        if (difference := _difference_of_one(one, other))
    ]
    more = f", and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return ", ".join(differing[:_NAMED]) + more


def _difference_of_one(actual: Any, expected: Any) -> str:
    import torch

    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return "" if is_same(actual, expected) else f"is {actual!r} in place of {expected!r}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {actual.dtype} {list(actual.shape)} in place of {expected.dtype} {list(expected.shape)}"
    return "" if _is_close(actual, expected) else "has other values"


def _is_close(one: Tensor, other: Tensor) -> bool:
    import torch

    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    a, b = one.double(), other.double()
    finite = b[b.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = _TOLERANCE.get(str(one.dtype).removeprefix("torch."), 1e-1) * largest
    return bool(torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True))
