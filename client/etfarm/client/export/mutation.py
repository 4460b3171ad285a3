"""The tensors that a model changes when it runs, and whether its exported program keeps the changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from etfarm.wire.regions import name_outputs
from etfarm.wire.written_inputs import is_mutation, written_inputs, written_placeholders, written_values

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

_DROPOUTS: Final = frozenset({"alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout"})
"""Operators of ATen that return their input itself in evaluation."""


@contextmanager
def assignments_written(module: nn.Module, forget: Callable[[str, str], None]) -> Iterator[set[str]]:
    """Write into a module's buffers what its calls assign to them: `self.cell.state = state` is `self.cell.state.copy_(state)`.

    Yields a set of these buffers' names, such as `cell.state`, which is filled by calls.

    torch.export forgets assignments to buffers of submodules, and returns the new value of a buffer where the old one was meant.
    What is assigned behind a buffer that is None it writes to the next buffer or input. A strict export cannot do this.

    Args:
        forget: called with the name of a buffer whose new value the program forgets, and a description of that value: None, or a
            tensor of another shape or dtype.
    """
    import torch
    from torch._functorch._aot_autograd.utils import register_buffer_assignment_hook
    from torch.nn.modules import module as modules
    from torch.utils import _pytree as pytree

    assigned: set[str] = set()
    before: dict[tuple[nn.Module, str], Tensor] = {}
    paths: dict[nn.Module, str] = {}
    held: set[int] = set()

    def memory(value: Any) -> int:
        is_plain = isinstance(value, torch.Tensor) and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)
        return value.untyped_storage()._cdata if is_plain else id(value)

    def note(root: nn.Module, args: Any, kwargs: Any) -> None:
        observers = modules._global_buffer_registration_hooks
        for key in [key for key, hook in observers.items() if hook.__module__ == register_buffer_assignment_hook.__module__]:
            del observers[key]  # torch.export's own, by which it would write each value once more
        before.clear()
        for path, part in root.named_modules():
            paths[part] = f"{path}." if path else ""
            before.update({(part, name): buffer for name, buffer in part._buffers.items() if buffer is not None})
        held.clear()
        held.update(map(memory, (*before.values(), *pytree.tree_leaves((args, kwargs)))))

    def separate(part: nn.Module, name: str, value: Any) -> Any:
        # An input, or the former value of another buffer, which may be written to later. After `self.n += 1`, it is its own.
        is_own = value is before.get((part, name), value)
        return value.clone() if not is_own and isinstance(value, torch.Tensor) and memory(value) in held else None

    def write(root: nn.Module, args: Any, outputs: Any) -> Any:
        changed = {key: old for key, old in before.items() if key[0]._buffers.get(key[1]) is not old}
        written = {memory(old) for old in changed.values()}
        outputs = pytree.tree_map(lambda leaf: leaf.clone() if memory(leaf) in written else leaf, outputs)
        for (part, name), old in changed.items():
            new, part._buffers[name] = part._buffers.get(name), old
            if new is not None and (new.shape, new.dtype) == (old.shape, old.dtype):
                old.copy_(new)
                assigned.add(f"{paths[part]}{name}")
            else:
                forget(f"{paths[part]}{name}", "None" if new is None else "a tensor of another shape or dtype")
        return outputs

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True),
        module.register_forward_hook(write),
        modules.register_module_buffer_registration_hook(separate),
    ]
    try:
        yield assigned
    finally:
        for hook in hooks:
            hook.remove()


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
    changed = {buffers.get(node.name) for node in written_placeholders(program.graph)} if shared else set()
    return next((" and ".join(group) for group in shared if not changed.isdisjoint(group)), "")


def changes_constants(program: ExportedProgram) -> bool:
    """Return whether an exported program writes to constants, so that it would forget what it wrote.

    Tensors become constants if a module reaches them by an object that is no module, such as a cache, even if they are its
    buffers, too. Only a strict export knows that.
    """
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    return any(node.name in constants for node in written_placeholders(program.graph))


def written_parameters(program: ExportedProgram) -> tuple[Tensor, ...]:
    """Return the parameters that an exported program writes to."""
    names = program.graph_signature.inputs_to_parameters
    return tuple(program.state_dict[names[node.name]] for node in written_placeholders(program.graph) if node.name in names)


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


def show_views(program: ExportedProgram) -> None:
    """Write operators that return their tensor, or a view of it, with operators that say so, in a program that writes to tensors.

    The schemas of einsum, meshgrid and dropout say that they return new tensors. run_decompositions believes it, and loses what
    is written to the one tensor for those who read the other.
    """
    import torch

    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    if not any(written_values(node) for part in parts for node in part.graph.nodes):
        return
    for part in parts:
        for node in part.graph.nodes:
            name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
            if name in ("broadcast_tensors", "meshgrid"):
                _expand(node)
                continue
            if name == "einsum" and len(node.args[1]) == 1:
                view = _permuted(node)
            else:
                view = node.args[0] if name in _DROPOUTS and node.args[2] is False else None
            if view is not None:
                node.replace_all_uses_with(view)
                part.graph.erase_node(node)
        part.recompile()
    name_outputs(program)


def _expand(node: Any) -> None:
    """Put expansions of its tensors in place of a meshgrid or a broadcast."""
    import torch

    aten = torch.ops.aten
    tensors, values = node.args[0], node.meta["val"]

    def call(target: Any, val: Any, *args: Any) -> Any:
        new = node.graph.call_function(target, args)
        new.meta = {**node.meta, "val": val}
        return new

    def size_of(size: Any) -> Any:
        if isinstance(size, int):
            return size
        shapes = ((each, each.meta["val"].shape) for each in tensors)
        places = ((each, dim) for each, shape in shapes for dim, other in enumerate(shape) if str(other) == str(size))
        return call(aten.sym_size.int, size, *next(places))

    with node.graph.inserting_before(node):
        for user in list(node.users):
            index = user.args[1]
            view, value = tensors[index], values[index]
            if "meshgrid" in str(node.target):
                own = 1 - index if index < 2 and node.kwargs.get("indexing") == "xy" else index
                lengths = [size if dim == own else 1 for dim, size in enumerate(value.shape)]
                shape = [size_of(size) for size in lengths]
                view = call(aten.view.default, view.meta["val"].view(lengths), view, shape)
            user.replace_all_uses_with(call(aten.expand.default, value, view, [size_of(size) for size in value.shape]))
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def find_overlapping_write(program: ExportedProgram) -> Any:
    """Return the first node that writes to a tensor whose elements share memory, as an expanded one's do; None without.

    Eager mode refuses most of these, and a program computes the others otherwise.
    """
    import torch

    parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    nodes = (node for part in parts for node in part.graph.nodes)
    return next((node for node in nodes if any(map(_overlaps, written_values(node)))), None)


def _overlaps(node: Any) -> bool:
    value = node.meta.get("val")
    sizes = zip(value.shape, value.stride(), strict=True) if hasattr(value, "stride") else ()
    return any(stride == 0 and not (isinstance(size, int) and size < 2) for size, stride in sizes)


def _permuted(node: Any) -> Any:
    """Put the operators of an einsum of one tensor before it; return None if it sums, else the last of them."""
    import torch

    aten = torch.ops.aten
    equation, (view,) = node.args[:2]
    before, arrow, after = equation.replace(" ", "").partition("->")
    count = view.meta["val"].dim() - len(before.replace("...", ""))

    def names_in(text: str) -> list[Any]:
        first, dots, last = text.partition("...")
        return [*first, *(range(count) if dots else ()), *last]

    names = names_in(before)
    once = sorted(each for each in names if isinstance(each, str) and names.count(each) == 1)
    returned = names_in(after) if arrow else [*(each for each in names if isinstance(each, int)), *once]
    if set(names) != set(returned):
        return None
    with node.graph.inserting_before(node):
        while twice := next((each for each in names if names.count(each) > 1), None):
            first = names.index(twice)
            second = names.index(twice, first + 1)
            value = aten.diagonal.default(view.meta["val"], 0, first, second)
            view = node.graph.call_function(aten.diagonal.default, (view, 0, first, second))
            view.meta = {**node.meta, "val": value}
            names = [*names[:first], *names[first + 1 : second], *names[second + 1 :], twice]
        view = node.graph.call_function(aten.permute.default, (view, [names.index(each) for each in returned]))
    view.meta = node.meta
    return view
