"""Debug handles of operators within branches and loops, which ExecuTorch's emitter loses.

The emitter of a branch or a loop's body is an object of its own, and only its instructions reach the program: the debug handles
that it collects are dropped, and numbered from the start of the branch. Here, all of them are kept, by the numbers that
instructions have in the program. Their nodes get these numbers as well.

Source: executorch/exir/emit/_emitter.py 1.5.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from executorch.exir.emit._emitter import _Emitter, _TopLevelEmitter

_HANDLES: Final = "_etfarm_handles"
_DELEGATES: Final = "_etfarm_delegates"
"""Attributes of the state that all emitters of a method share."""


@contextmanager
def kept_handles() -> Iterator[None]:
    """Keep the debug handles of all instructions of the programs that are emitted inside the context."""
    add_handle, add_delegate, run = _Emitter._add_debug_handle, _Emitter._add_delegate_map, _Emitter.run

    def adding_handle(emitter: Any, instruction: int, *args: Any, **kwargs: Any) -> None:
        add_handle(emitter, instruction, *args, **kwargs)
        if instruction in emitter.debug_handle_map:
            kept = vars(emitter.emitter_state).setdefault(_HANDLES, {})
            number = emitter.instruction_start_offset + instruction
            kept[number] = emitter.debug_handle_map[instruction]
            emitter.node.meta["debug_handle"] = number  # as the emitter does outside of branches; see `refused_operators`

    def adding_delegate(emitter: Any, lowered: Any, instruction: int) -> None:
        add_delegate(emitter, lowered, instruction)
        kept = vars(emitter.emitter_state).setdefault(_DELEGATES, {})
        kept[emitter.instruction_start_offset + instruction] = emitter.instr_id_to_delegate_debug_id_map[instruction]

    def running(emitter: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(emitter, *args, **kwargs)
        if isinstance(emitter, _TopLevelEmitter):
            state = vars(emitter.emitter_state)
            emitter.debug_handle_map.update(state.get(_HANDLES, {}))
            emitter.instr_id_to_delegate_debug_id_map.update(state.get(_DELEGATES, {}))
        return result

    _Emitter._add_debug_handle, _Emitter._add_delegate_map, _Emitter.run = adding_handle, adding_delegate, running
    try:
        yield
    finally:
        _Emitter._add_debug_handle, _Emitter._add_delegate_map, _Emitter.run = add_handle, add_delegate, run
