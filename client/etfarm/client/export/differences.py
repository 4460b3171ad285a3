"""Inputs for which a program differs from its model, which are both called for that.

These are the example inputs, where an export keeps what Python computed in forward; and sizes of 1 and 0 of dynamic dims.
torch.export assumes that a dynamic size is 2 or more where code asks whether it is 1 or 0, and records no guard: the program of
`x * 10 if x.shape[0] == 1 else x` returns `x` for each size.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from etfarm.client.export.attributes import Snapshot
from etfarm.client.export.calls import difference_of, outputs_of, tensors_kept, threads_for
from etfarm.client.export.mutation import written_parameters
from etfarm.client.export.structures import plain_spec
from etfarm.wire.output_names import names_of_structure

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

_LIMIT_S: Final = 20.0
"""Duration in s after which no further size is tried."""


def difference_for_examples(module: nn.Module, program: ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how a program's outputs differ from those of its module; empty if they do not, or if the module does not run.

    Both are called, and left as they were. The program gets what a device gets: a tensor of its own for each input, also where
    the module gets a tensor twice, or a view of another.
    """
    import torch
    from torch.utils import _pytree as pytree

    def separate(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    called = program.module(check_guards=False)
    inputs, of_program = (args, kwargs), pytree.tree_map(separate, (args, kwargs))
    difference = _difference(module, program, called, inputs, of_program)
    kinds = dict.fromkeys(_kinds_of_objects(pytree.tree_structure(inputs))) if difference else {}
    if kinds and not _difference(module, program, called, pytree.tree_map(lambda leaf: leaf, inputs), of_program):
        return f"{' and '.join(kinds)}, rebuilt from its tensors, lacks what else it keeps: {difference}"
    return difference


def _kinds_of_objects(spec: Any) -> Iterator[str]:
    """Yield the names of the classes in a structure that are not containers of Python."""
    if not spec.is_leaf():
        if spec.type not in (tuple, list, dict, OrderedDict, defaultdict, namedtuple):
            yield spec.type.__name__
        for child in spec.children():
            yield from _kinds_of_objects(child)


def differing_sizes(module: nn.Module, program: ExportedProgram) -> list[str]:
    """Return the dynamic dims of inputs at whose size 1 or 0 a program differs from its module, as `wire.differences` shows them.

    Both are called with slices of the example inputs, and left as they were. A call of size 0 that raises counts as no
    difference: few models mean it, and it is the default minimum of a Dim.
    """
    called: Callable[..., Any] | None = None
    differing = []
    started = time.monotonic()
    for where, size, inputs in _small_inputs(program):
        if time.monotonic() - started > _LIMIT_S:
            break
        called = called or program.module()
        if (difference := _difference(module, program, called, inputs, inputs)) and not (size == 0 and "raises" in difference):
            differing.append(f"{where} has the size {size} ({difference})")
    return differing


def _small_inputs(program: ExportedProgram) -> Iterator[tuple[str, int, Any]]:
    """Yield inputs in which one dynamic size is 1 or 0, with the name of its dim and that size."""
    import torch
    from torch.utils import _pytree as pytree

    small = [symbol for symbol, limits in program.range_constraints.items() if limits.lower < 2]
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    names = [each.arg.name for each in program.graph_signature.input_specs if each.kind.name == "USER_INPUT"]
    if not small or len(names) != len(leaves):
        return
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    # Sizes as expressions: a number, a symbol, or a multiple of one.
    sizes = [[_expression(size) for size in getattr(values.get(name), "shape", ())] for name in names]
    known = {
        size: leaf.shape[dim]
        for leaf, shape in zip(leaves, sizes, strict=True)
        if isinstance(leaf, torch.Tensor)
        for dim, size in enumerate(shape)
        if getattr(size, "is_Symbol", False)
    }
    for symbol in (symbol for symbol in small if symbol in known):
        dims = ((name, dim) for name, shape in zip(names, sizes, strict=True) for dim, size in enumerate(shape) if size == symbol)
        name, dim = next(dims)
        for size in range(1, max(int(program.range_constraints[symbol].lower), 0) - 1, -1):
            cut = [_cut(leaf, shape, {**known, symbol: size}) for leaf, shape in zip(leaves, sizes, strict=True)]
            if all(leaf is not NotImplemented for leaf in cut):
                yield f"dim {dim} of {name!r}", size, pytree.tree_unflatten(cut, spec)


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _cut(leaf: Any, shape: list[Any], known: dict[Any, int]) -> Any:
    """Return the first elements of a tensor along the dims that become smaller; NotImplemented if one would become larger."""
    for dim, size in enumerate(shape):
        if isinstance(size, int):
            continue
        wanted = size.subs(known)
        if not wanted.is_Integer or not 0 <= wanted <= leaf.shape[dim]:
            return NotImplemented
        leaf = leaf.narrow(dim, 0, int(wanted))
    return leaf.contiguous() if shape else leaf


def _difference(module: nn.Module, program: ExportedProgram, called: Callable[..., Any], inputs: Any, of_program: Any) -> str:
    import torch
    from torch.utils import _pytree as pytree

    attributes = Snapshot(module)
    buffers = [program.state_dict[name] for name in program.graph_signature.buffers if name in program.state_dict]
    constants = [each for each in program.constants.values() if isinstance(each, torch.Tensor)]
    held = (*attributes.tensors, *buffers, *constants, *written_parameters(program))
    tensors = [*program.state_dict.values(), *filter(torch.is_tensor, pytree.tree_leaves(of_program))]
    results: list[Any] = []
    for function, (args, kwargs) in ((module, inputs), (called, of_program)):
        try:
            with tensors_kept(module, held), threads_for(sum(tensor.numel() for tensor in tensors)):
                results.append(outputs_of(function, args, kwargs))
        except Exception as error:  # noqa: BLE001 - the module is the user's, which need not accept this size
            results.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        finally:
            attributes.restore()
    expected, actual = results
    if isinstance(expected, str):
        return ""  # the program does not check what the model refuses
    return (
        f"only the program raises {actual}"
        if isinstance(actual, str)
        else difference_of(actual, expected, _output_names(program))
    )


def _output_names(program: ExportedProgram) -> tuple[str, ...]:
    from torch.utils import _pytree as pytree

    structure = program.call_spec.out_spec
    return () if structure is None else names_of_structure(pytree.treespec_dumps(plain_spec(structure)))
