"""Buffers that several methods of a model share, which its program must plan as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from etfarm.wire.shared_state import PREFIX, buffer_names, rename_buffers
from etfarm.wire.written_inputs import written_placeholders

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

Group = Mapping[str, frozenset[str]]
"""The names that one buffer has in its methods."""


def find_common_buffers(methods: Mapping[str, nn.Module]) -> list[Group]:
    """Return the buffers that are one object in several methods' modules."""
    groups: dict[int, dict[str, set[str]]] = {}
    for method, module in methods.items():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            groups.setdefault(id(buffer), {}).setdefault(method, set()).add(name)
    return [{method: frozenset(names) for method, names in group.items()} for group in groups.values() if len(group) > 1]


def mark_shared(programs: Mapping[str, ExportedProgram], groups: list[Group]) -> bool:
    """Give each common buffer that a method writes to one name in all programs; return whether there is any."""
    written = {}
    for method, program in programs.items():
        buffers = buffer_names(program)
        written[method] = {buffers[node.name] for node in written_placeholders(program.graph) if node.name in buffers}
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
