"""Buffers that several methods of a model share, which its program must plan as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from etfarm.wire.shared_state import PREFIX, keep_constants, rename_buffers, written_buffers

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

Group = Mapping[str, frozenset[str]]
"""The names that one buffer has in its methods."""


@contextmanager
def marked(programs: Mapping[str, ExportedProgram]) -> Iterator[None]:
    """Mark the buffers that programs share, as `mark_shared`, and keep the constants that they write to, while they are saved."""
    kept = []
    for program in programs.values():
        specs = (*program.graph_signature.input_specs, *program.graph_signature.output_specs)
        values = (program._state_dict, program._constants)
        kept.append(([(vars(spec), dict(vars(spec))) for spec in specs], [(each, dict(each)) for each in values]))
    try:
        for program in programs.values():
            keep_constants(program)
        mark_shared(programs)
        yield
    finally:
        for pairs in kept:
            for current, before in (*pairs[0], *pairs[1]):
                current.clear()
                current.update(before)


def mark_shared(programs: Mapping[str, ExportedProgram], modules: Mapping[str, nn.Module] | None = None) -> bool:
    """Give each buffer of several methods, of which one writes to it, one name in all programs; return whether there is any.

    Args:
        modules: the methods' modules, whose buffers count if the programs were exported from copies.
    """
    groups = _find_common(programs, modules or {})
    written = {method: written_buffers(program) for method, program in programs.items()}
    marks: dict[str, dict[str, str]] = {method: {} for method in programs}
    taken: set[str] = set()
    for group in groups:
        if not any(names & written[method] for method, names in group.items()):
            continue
        first = next(iter(group))
        mark = PREFIX + min(group[first])
        if mark in taken:  # by another buffer of the same name
            mark = f"{PREFIX}{first}.{min(group[first])}"
        taken.add(mark)
        for method, names in group.items():
            marks[method].update(dict.fromkeys(names, mark))
    for method, program in programs.items():
        rename_buffers(program, marks[method])
    return bool(taken)


def _find_common(programs: Mapping[str, ExportedProgram], modules: Mapping[str, nn.Module]) -> list[Group]:
    """Return the buffers that are one memory in several methods.

    What a module reaches by an object that is no module, such as a list, is a constant of its program, and a buffer in others.
    """
    groups: dict[object, dict[str, set[str]]] = {}
    for method, program in programs.items():
        named = dict(modules[method].named_buffers(remove_duplicate=False)) if method in modules else {}
        for spec in program.graph_signature.input_specs:
            if spec.kind.name in ("BUFFER", "CONSTANT_TENSOR") and spec.target is not None:
                named.setdefault(spec.target, program.state_dict.get(spec.target, program.constants.get(spec.target)))
        for name, tensor in named.items():
            groups.setdefault(_memory(tensor), {}).setdefault(method, set()).add(name)
    return [{method: frozenset(names) for method, names in group.items()} for group in groups.values() if len(group) > 1]


def _memory(tensor: Any) -> object:
    """Return what equals that of another tensor object if both are one tensor in one memory."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Buffer) or not tensor.numel():
        return id(tensor)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride())
