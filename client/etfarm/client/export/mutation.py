"""The tensors that an exported program changes, and whether it can keep the changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from etfarm.wire.written_inputs import is_mutation, written_inputs, written_placeholders

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
    return any(node.name in constants for node in written_placeholders(program.graph))


def keep_mutations(program: ExportedProgram) -> tuple[str, ...]:
    """Make the changed inputs of an exported program outputs of it, named as the inputs; return their names.

    They follow the model's own outputs: what returned `y` returns `{"": y, "x": x}`.
    """
    from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
    from torch.utils import _pytree as pytree

    names = tuple(written_inputs(program))
    if not names:
        return names
    nodes = {node.name: node for node in program.graph.nodes}
    specs = program.graph_signature.output_specs
    output = program.graph.output_node()
    changed = {spec.target: node for spec, node in zip(specs, output.args[0], strict=True) if is_mutation(spec)}
    kept = [(spec, node) for spec, node in zip(specs, output.args[0], strict=True) if not is_mutation(spec)]
    for name in names:
        node = changed.get(name, nodes[name])
        kept.append((OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None), node))
    specs[:] = [spec for spec, _ in kept]
    output.args = (tuple(node for _, node in kept),)
    program.graph_module.recompile()
    signature = program.module_call_graph[0].signature
    leaves = [pytree.tree_structure(0) for _ in names]
    signature.out_spec = pytree.TreeSpec(dict, ["", *names], [signature.out_spec, *leaves])
    if signature.outputs:
        signature.outputs.extend(TensorArgument(name=spec.arg.name) for spec in specs[-len(names) :])
    return names


def _written(program: ExportedProgram) -> Iterator[str]:
    """Yield the placeholders that operators write to, themselves or what operators make of them."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            written = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            while argument.is_write and getattr(written, "op", "") == "call_function" and written.all_input_nodes:
                written = written.all_input_nodes[0]
            if argument.is_write and getattr(written, "op", "") == "placeholder":
                yield written.name
