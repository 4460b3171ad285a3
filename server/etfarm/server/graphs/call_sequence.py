"""Calls of exported programs, one after the other, in eager PyTorch. For children."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from etfarm.server.graphs import differences
from etfarm.wire.shared_state import buffer_names, written_buffers
from etfarm.wire.tensors import Value


def run_calls(
    programs: Mapping[str, Any], calls: Iterable[tuple[str, Sequence[Any]]], shared: Collection[str]
) -> Iterator[list[Any]]:
    """Yield the flattened outputs of each call of methods whose buffers keep their state.

    An output may be a buffer, so read it before the next call. Buffers that the methods change are restored at the end.

    Args:
        programs: exported programs by method.
        calls: methods with flattened inputs: tensors and plain Python values.
        shared: names of buffers that are one in all methods that have them.
    """
    import torch
    from torch.utils import _pytree as pytree

    state: dict[str, torch.Tensor] = {}
    modules = {method: program.module() for method, program in programs.items()}
    names = {method: set(shared) & set(buffer_names(program).values()) for method, program in programs.items()}
    with ExitStack() as stack:
        for method, program in programs.items():
            stack.enter_context(unchanged(program, written_buffers(program) | names[method]))
        for method, leaves in calls:
            program = programs[method]
            buffers = {name: buffer for name in names[method] if (buffer := _buffer(program, name)) is not None}
            for name in buffers.keys() & state.keys():
                buffers[name].copy_(state[name])
            args, kwargs = pytree.tree_unflatten(list(leaves), program.call_spec.in_spec)
            with torch.no_grad():
                outputs = pytree.tree_leaves(modules[method](*args, **kwargs))
            yield outputs
            state.update({name: buffer.clone() for name, buffer in buffers.items()})


def find_wrong_call(
    methods: Sequence[str], expected: Sequence[Sequence[Value]], actual: Sequence[Sequence[Value]], *, quantized: bool
) -> tuple[int, str] | None:
    """Return the first of several calls whose outputs count as wrong, with the reason as a sentence; None if there is none."""
    for index, (wanted, outputs) in enumerate(zip(expected, actual, strict=True)):
        if len(wanted) != len(outputs):
            listed = f"it returned {len(outputs)} outputs, but the model returns {len(wanted)}"
        else:
            pairs = zip(wanted, outputs, strict=True)
            compared = (differences.difference(want.name, want, got) for want, got in pairs)
            listed = "; ".join(filter(None, (differences.find_problem(each, quantized=quantized) for each in compared)))
        if listed:
            # The last seven before it.
            sequence = ", ".join((*(("...",) if index > 7 else ()), *methods[max(0, index - 7) : index + 1]))
            model = "is far from the model" if quantized else "differs from eager PyTorch"
            return index, f"in the calls {sequence}, the last one {model}: {listed}."
    return None


@contextmanager
def unchanged(program: Any, names: Collection[str] | None = None) -> Iterator[None]:
    """Restore the buffers that runs change afterwards: those in `names`, or those that the program writes to when None."""
    # ep.module() shares its buffers with the program, so a run would otherwise change the program that is lowered later.
    buffers = [_buffer(program, name) for name in sorted(written_buffers(program) if names is None else names)]
    copies = [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]
    try:
        yield
    finally:
        for buffer, copy in copies:
            buffer.copy_(copy)


def _buffer(program: Any, name: str) -> Any:
    return program.state_dict.get(name, program.constants.get(name))
