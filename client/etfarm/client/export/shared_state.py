"""Buffers that several methods of a model share, which its program must plan as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from etfarm.wire.errors import error_for
from etfarm.wire.shared_state import PREFIX, keep_constants, rename_buffers, written_buffers

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.export import ExportedProgram

Group = Mapping[str, frozenset[str]]
"""The names that one buffer has in its methods."""

_SEPARATE: Final = ", or set share_mutable_buffers = false in [executorch] of a recipe file for separate states"


class _Place(NamedTuple):
    """A tensor's place in memory."""

    storage: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> range:
        """The bytes from the first element to the last one."""
        last = self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return range(self.offset * self.dtype.itemsize, (last + 1) * self.dtype.itemsize)

    def overlaps(self, other: _Place) -> bool:
        """Return whether the two have bytes between them that may be the same."""
        return self.bytes.start < other.bytes.stop and other.bytes.start < self.bytes.stop


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


def mark_shared(
    programs: Mapping[str, ExportedProgram],
    modules: Mapping[str, nn.Module] | None = None,
    say: Callable[[str], None] | None = None,
) -> bool:
    """Give each buffer of several methods, of which one writes to it, one name in all programs; return whether there is any.

    Args:
        modules: the methods' modules, whose buffers count if the programs were exported from copies.
        say: called with a sentence for a buffer that is a different view of another method's, if each method is to have a state
            of its own; else None.

    Raises:
        STATE_NOT_SHARED: a buffer is a different view of another method's.
    """
    memories = _memories(programs, modules or {})
    groups = [{method: frozenset(names) for method, names in group.items()} for group in memories.values() if len(group) > 1]
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
    for first, second in _views(memories, written):
        why = f"{first} and {second} are different views of one memory"
        if say is None:
            raise error_for(
                "STATE_NOT_SHARED",
                f"{why}, which a program cannot have as one buffer.",
                "Register the memory as one buffer in a module of both methods, and take its parts in forward, such as "
                f"self.cache[0]{'' if modules is None else _SEPARATE}.",
                stage="TORCH_EXPORT", buffer=first, methods=f"{first.partition(':')[0]},{second.partition(':')[0]}",
            )  # fmt: skip
        say(f"{why}: each method has a state of its own there.")
    return bool(taken)


def _views(
    memories: Mapping[object, Mapping[str, set[str]]], written: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, str]]:
    """Yield buffers of two methods that are different views of the same bytes, of which one is written to."""
    storages: dict[int, list[_Place]] = {}
    for place in memories:
        if isinstance(place, _Place):
            storages.setdefault(place.storage, []).append(place)
    for places in storages.values():
        for one, other in combinations(places, 2):
            if not one.overlaps(other):
                continue
            for (method, names), (other_method, others) in product(memories[one].items(), memories[other].items()):
                is_written = not names.isdisjoint(written[method]) or not others.isdisjoint(written[other_method])
                if method != other_method and is_written:
                    yield f"{method}: {min(names)}", f"{other_method}: {min(others)}"


def _memories(programs: Mapping[str, ExportedProgram], modules: Mapping[str, nn.Module]) -> dict[object, dict[str, set[str]]]:
    """Return the names of each buffer's memory by method.

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
    return groups


def _memory(tensor: Any) -> object:
    """Return what equals that of another tensor object if both are one tensor in one memory."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Buffer) or not tensor.numel():
        return id(tensor)
    return _Place(
        tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()
    )
