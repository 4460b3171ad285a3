"""Structures of inputs and outputs that every server can read: tuples, lists and dicts in place of other classes.

A .pt2 names the class of each container, such as a ModelOutput of transformers or a user's registered dataclass. A server has
none of these classes, and imports nothing that a file names.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of fields that may become keys."""

_NOT_IN_GUARDS: Final = re.compile(r"[^A-Za-z0-9_.\- :/]")
"""Characters that a server does not accept in the keys of inputs, which torch writes into the code of guards."""

_STACK: Final = "nn_module_stack"
"""Key of the modules that called an operator in a node's meta."""

_SEPARATORS: Final = re.compile(r"""(\[(?:\d+|'[^';,()\[\]]*'|"[^";,()\[\]]*")\])|[;,()\[\]]""")
"""Characters of a ModuleDict's keys that torch.export.load takes for those between modules, and then fails; indices are none."""


def to_plain(value: Any, plain_key: Callable[[Any], Any] | None = None) -> Any:
    """Return a pytree with the same leaves in tuples, lists and dicts; see `plain_spec`."""
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(value)
    return pytree.tree_unflatten(leaves, plain_spec(spec, plain_key))


def plain_spec(spec: Any, plain_key: Callable[[Any], Any] | None = None) -> Any:
    """Return a pytree's structure with tuples, lists and dicts only: a dict of its fields for a class with named fields.

    Args:
        plain_key: returns the key of a dict in place of another one; `output_key` when None. A key that it makes equal to
            another one becomes its place.
    """
    from torch.utils import _pytree as pytree

    if spec.is_leaf():
        return spec
    children = [plain_spec(child, plain_key) for child in spec.children()]
    if spec.type in (tuple, list):
        return pytree.TreeSpec(spec.type, spec.context, children)
    if _is_dict(spec):
        return pytree.TreeSpec(dict, _plain_keys(spec, plain_key or output_key), children)
    names = _field_names(spec)
    if names is not None:
        return pytree.TreeSpec(dict, names, children)
    is_list = isinstance(spec.type, type) and issubclass(spec.type, list)
    return pytree.TreeSpec(list if is_list else tuple, None, children)


def _plain_keys(spec: Any, plain_key: Callable[[Any], Any]) -> list[Any]:
    """Return the keys of a dict in their plain form, each once: `"0"` and `"None"` of `{None: a, "None": b}`."""
    keys = _keys(spec)
    plain = [plain_key(key) for key in keys]
    taken = {new for key, new in zip(keys, plain, strict=True) if repr(new) == repr(key)}
    for place, (key, new) in enumerate(zip(keys, plain, strict=True)):
        if repr(new) != repr(key):
            candidates = (new, *(f"{place}{'_' * count}" for count in range(len(keys))))
            plain[place] = next(each for each in candidates if each not in taken)
            taken.add(plain[place])
    return plain


def output_key(key: Any) -> Any:
    """Return a key that JSON represents: text, a whole number or a bool as it is, and a tuple of these as text: `('a', 1)`."""
    if isinstance(key, Enum):
        key = key.value if isinstance(key.value, str | int) else key.name
    if type(key).__module__ == "numpy" and hasattr(key, "item"):
        key = key.item()
    if isinstance(key, bool):
        return key
    if isinstance(key, Integral):
        return int(key)
    if isinstance(key, tuple):
        return str(_plain_tuple(key))
    return str(key) if key is None or isinstance(key, str | float) else key


def _plain_tuple(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_plain_tuple(key) if isinstance(key, tuple) else output_key(key) for key in keys)


def input_key(key: Any) -> Any:
    """Return a key that may be part of a guard; characters that may not are replaced by their numbers: `:e9:` for `é`."""
    plain = output_key(key)
    return _NOT_IN_GUARDS.sub(lambda match: f":{ord(match[0]):x}:", plain) if isinstance(plain, str) else plain


def _is_dict(spec: Any) -> bool:
    return spec.type in (dict, OrderedDict, defaultdict)


def _keys(spec: Any) -> list[Any]:
    return list(spec.context[1] if spec.type is defaultdict else spec.context)


@contextmanager
def plain_structures(program: ExportedProgram) -> Iterator[None]:
    """Give a program the plain structures of its inputs and outputs meanwhile."""
    signatures = [entry.signature for entry in program.module_call_graph if entry.signature is not None]
    specs = [(signature, signature.in_spec, signature.out_spec) for signature in signatures]
    examples, guards = program.example_inputs, program._guards_code
    try:
        program._guards_code = _plain_guards(guards, program.call_spec.in_spec)
        for signature, in_spec, out_spec in specs:
            signature.in_spec, signature.out_spec = plain_spec(in_spec, input_key), plain_spec(out_spec)
        program.example_inputs = to_plain(examples, input_key)
        yield
    finally:
        for signature, in_spec, out_spec in specs:
            signature.in_spec, signature.out_spec = in_spec, out_spec
        program.example_inputs, program._guards_code = examples, guards  # checked against in_spec


@contextmanager
def plain_module_paths(program: ExportedProgram) -> Iterator[None]:
    """Write the modules' paths of a program's nodes without the characters that separate them in archives meanwhile."""
    graphs = [module.graph for module in program.graph_module.modules() if hasattr(module, "graph")]
    stacks = [(node, stack) for graph in graphs for node in graph.nodes if (stack := node.meta.get(_STACK))]
    try:
        for node, stack in stacks:
            node.meta[_STACK] = {_plain_path(str(key)): (_plain_path(path), kind) for key, (path, kind) in stack.items()}
        yield
    finally:
        for node, stack in stacks:
            node.meta[_STACK] = stack


def _plain_path(path: str) -> str:
    return _SEPARATORS.sub(lambda match: match[1] or "_", path)


def _plain_guards(guards: list[str], in_spec: Any) -> list[str]:
    """Return guards that read inputs from dicts with plain keys: `L['batch'].left` becomes `L['batch']['left']`."""
    for key, plain in _changed_keys(in_spec):
        guards = [guard.replace(f"[{key!r}]", f"[{plain!r}]") for guard in guards]
    fields = sorted(_attributes(in_spec), key=len, reverse=True)
    if not fields:
        return guards
    pattern = re.compile(rf"(?<=[\]\w])\.({'|'.join(map(re.escape, fields))})\b(?!\()")
    return [pattern.sub(r"['\1']", guard) for guard in guards]


def _changed_keys(spec: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys of a structure's dicts that are not plain, each with the one in its place."""
    if not spec.is_leaf():
        if _is_dict(spec):
            pairs = zip(_keys(spec), _plain_keys(spec, input_key), strict=True)
            yield from ((key, plain) for key, plain in pairs if repr(plain) != repr(key))
        for child in spec.children():
            yield from _changed_keys(child)


def _attributes(spec: Any) -> set[str]:
    """Return the names of fields that are read as attributes."""
    if spec.is_leaf():
        return set()
    foreign = spec.type not in (tuple, list) and not _is_dict(spec)
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
