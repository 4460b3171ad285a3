"""The tensors that an exported program changes, and whether it can keep the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def find_shared_buffers(program: ExportedProgram) -> str:
    """Return the names of a buffer that an exported program has under several names, if it changes it; else empty.

    The program cannot be lowered: run_decompositions fails on two inputs that are one tensor. A strict export has one input for
    them. It has two for different views of one memory, so a strict export is of no use for these.
    """
    buffers = program.graph_signature.inputs_to_buffers
    names: dict[int, list[str]] = {}
    for name in sorted(set(buffers.values())):
        tensor = program.state_dict.get(name, program.constants.get(name))
        if tensor is not None:
            names.setdefault(id(tensor), []).append(name)
    shared = [group for group in names.values() if len(group) > 1]
    changed = {buffers.get(placeholder) for placeholder in _written(program)} if shared else set()
    return next((" and ".join(group) for group in shared if not changed.isdisjoint(group)), "")


def changes_constants(program: ExportedProgram) -> bool:
    """Return whether an exported program writes to constants, so that it would forget what it wrote.

    Tensors become constants if a module reaches them by an object that is no module, such as a cache, even if they are its
    buffers, too. Only a strict export knows that.
    """
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    return any(name in constants for name in _written(program, _is_alias))


def _written(program: ExportedProgram, follows: Callable[[Any], bool] = lambda node: True) -> Iterator[str]:
    """Yield the placeholders that operators write to, themselves or what operators that `follows` accepts make of them."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            written = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            while (
                argument.is_write
                and getattr(written, "op", "") == "call_function"
                and follows(written)
                and written.all_input_nodes
            ):
                written = written.all_input_nodes[0]
            if argument.is_write and getattr(written, "op", "") == "placeholder":
                yield written.name


def _is_alias(node: Any) -> bool:
    """Return whether an operator returns its input or a view of it, unlike a copy."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.returns) and schema.returns[0].alias_info is not None
