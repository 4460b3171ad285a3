"""Structures of inputs and outputs that every server can read: tuples, lists and dicts in place of other classes.

A .pt2 names the class of each container, such as a ModelOutput of transformers or a user's registered dataclass. A server has
none of these classes, and imports nothing that a file names.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names that may become names of outputs, and that a server accepts as keys."""


def to_plain(value: Any) -> Any:
    """Return a pytree with the same leaves in tuples, lists and dicts."""
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(value)
    return pytree.tree_unflatten(leaves, plain_spec(spec))


def plain_spec(spec: Any) -> Any:
    """Return a pytree's structure with tuples, lists and dicts only: a dict of its fields for a class with named fields."""
    from torch.utils import _pytree as pytree

    if spec.is_leaf():
        return spec
    children = [plain_spec(child) for child in spec.children()]
    if spec.type in (tuple, list, dict):
        return pytree.TreeSpec(spec.type, spec.context, children)
    if spec.type is OrderedDict:
        return pytree.TreeSpec(dict, list(spec.context), children)
    if spec.type is defaultdict:
        return pytree.TreeSpec(dict, list(spec.context[1]), children)
    names = _field_names(spec)
    if names is not None:
        return pytree.TreeSpec(dict, names, children)
    is_list = isinstance(spec.type, type) and issubclass(spec.type, list)
    return pytree.TreeSpec(list if is_list else tuple, None, children)


def name_outputs(program: ExportedProgram) -> None:
    """Rename the nodes that compute outputs to the outputs' keys and fields, such as `logits` or `hidden_states_0`.

    An output without a key, one that is an input or a parameter itself, and one whose name is taken or Python's own keep
    their names.
    """
    from torch.utils import _pytree as pytree

    spec = plain_spec(program.call_spec.out_spec)
    paths = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * spec.num_leaves, spec))[0]
    outputs = [output for output in program.graph_signature.output_specs if output.kind.name == "USER_OUTPUT"]
    nodes = {node.name: node for node in program.graph.nodes}
    renamed: set[str] = set()
    for output, (path, _) in zip(outputs, paths, strict=True):
        node = nodes.get(getattr(output.arg, "name", ""))
        name = "_".join(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path)
        if node is None or node.op != "call_function" or node.name in renamed or name in nodes or not _is_variable(name):
            continue
        before = node.name
        node._rename(name)
        nodes[node.name] = node
        renamed.add(node.name)
        program.graph_signature.replace_all_uses(before, node.name)
        for entry in program.module_call_graph:
            for argument in entry.signature.outputs if entry.signature is not None else ():
                if getattr(argument, "name", None) == before:
                    argument.name = node.name


def _is_variable(name: str) -> bool:
    """Return whether torch.fx accepts a name for a node as it is, and generates working code with it."""
    is_name = _FIELD.fullmatch(name) is not None and not keyword.iskeyword(name) and not hasattr(builtins, name)
    return is_name and name != "self"


@contextmanager
def plain_structures(program: ExportedProgram) -> Iterator[None]:
    """Give a program the plain structures of its inputs and outputs meanwhile."""
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature is not None]
    specs = [(signature, signature.in_spec, signature.out_spec) for signature in signatures]
    examples, guards = program.example_inputs, program._guards_code
    try:
        program._guards_code = _plain_guards(guards, program.call_spec.in_spec)
        for signature, in_spec, out_spec in specs:
            signature.in_spec, signature.out_spec = plain_spec(in_spec), plain_spec(out_spec)
        program.example_inputs = to_plain(examples)
        yield
    finally:
        for signature, in_spec, out_spec in specs:
            signature.in_spec, signature.out_spec = in_spec, out_spec
        program.example_inputs, program._guards_code = examples, guards  # checked against in_spec


def _plain_guards(guards: list[str], in_spec: Any) -> list[str]:
    """Return guards that read inputs from dicts: `L['batch'].left` becomes `L['batch']['left']`."""
    fields = sorted(_attributes(in_spec), key=len, reverse=True)
    if not fields:
        return guards
    pattern = re.compile(rf"(?<=[\]\w])\.({'|'.join(map(re.escape, fields))})\b(?!\()")
    return [pattern.sub(r"['\1']", guard) for guard in guards]


def _attributes(spec: Any) -> set[str]:
    """Return the names of fields that are read as attributes."""
    if spec.is_leaf():
        return set()
    foreign = spec.type not in (tuple, list, dict, OrderedDict, defaultdict)
    names = set(_field_names(spec) or ()) if foreign else set()
    return names.union(*(_attributes(child) for child in spec.children()))


def _field_names(spec: Any) -> list[str] | None:
    """Return the names of a container's fields in the order of its children; None if they have no names.

    Source: the contexts of torch.utils._pytree: a namedtuple's is its class, a dataclass's starts with the list of its fields,
    and that of transformers' ModelOutput is the list of its keys.
    """
    from torch.utils import _pytree as pytree

    context = spec.context
    if spec.type is namedtuple:
        return _checked(list(context._fields), spec)
    for names in (context, context[0] if isinstance(context, list | tuple) and context else None):
        if isinstance(names, list | tuple) and (checked := _checked(list(names), spec)) is not None:
            return checked
    definition = pytree.SUPPORTED_NODES.get(spec.type)
    if definition is None or definition.flatten_with_keys_fn is None:
        return None
    try:
        container = definition.unflatten_fn([0] * spec.num_children, context)
        keys = [key for key, _ in definition.flatten_with_keys_fn(container)[0]]
    except Exception:  # noqa: BLE001 - the class is the user's; without names its fields are a tuple
        return None
    return _checked([getattr(key, "name", getattr(key, "key", None)) for key in keys], spec)


def _checked(names: list[Any], spec: Any) -> list[str] | None:
    is_named = bool(names) and len(names) == spec.num_children == len(set(map(str, names)))
    return names if is_named and all(isinstance(name, str) and _FIELD.fullmatch(name) for name in names) else None
