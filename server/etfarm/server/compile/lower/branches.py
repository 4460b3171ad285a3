"""Branches and loops: what ExecuTorch loses of them: debug handles, outputs, and arguments of which there are views.

The emitter of a branch or a loop's body is an object of its own, and only its instructions reach the program: the debug handles
that it collects are dropped, and numbered from the start of the branch. Here, all of them are kept, by the numbers that
instructions have in the program. Their nodes get these numbers as well.

The output of torch.cond is no tensor of its own: the program moves it to the memory of the branch that ran. All branches and loop
bodies have that memory in turn, so that a later one overwrites it, and a view reads the memory that was planned for the output.
Here, such outputs are copied. A view of a loop's output, whose sizes change while it is made, is refused without a copy.

Views of the arguments of a loop's body read memory that was planned for these, but the arguments are tensors of outside, but for
slices of what the loop iterates over, and nothing writes that memory. Here, arguments with views are copied.

Source: executorch/exir/emit/_emitter.py, executorch/exir/memory_planning.py 1.5.1.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from executorch.exir.dialects._ops import ops
from executorch.exir.emit._emitter import _Emitter, _TopLevelEmitter
from torch._ops import HigherOrderOperator

_BRANCHING: Final = ("cond", "map_impl", "scan", "while_loop")
_VIEW: Final = ops.edge.aten.view_copy.default
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


def copy_arguments(edge: Any) -> None:
    """Copy the arguments of loop bodies of an edge program that views would read elsewhere.

    Args:
        edge: the program, whose graphs are changed.
    """
    for module in edge.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if _kind(node) in ("map_impl", "scan"):
                body = getattr(module, node.args[0].target)
                for argument in body.graph.find_nodes(op="placeholder"):
                    if views := [user for user in argument.users if user.target == _VIEW]:
                        _copy(argument, views)
                body.recompile()


def copy_outputs(edge: Any) -> list[Any]:
    """Copy the outputs of branches and loops of an edge program that would be lost; return the nodes of these.

    Args:
        edge: the program, whose graphs are changed.
    """
    copied = []
    for module in edge.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            nodes = list(module.graph.nodes)
            copied += [node for node in nodes if _kind(node) and _copy_outputs(module, node, nodes)]
    return copied


def _copy_outputs(module: torch.fx.GraphModule, branching: Any, nodes: list[Any]) -> bool:
    places = {node: place for place, node in enumerate(nodes)}
    later = min((places[node] for node in nodes[places[branching] + 1 :] if _kind(node)), default=len(nodes))
    copied = False
    for output in branching.users:
        if output.target is not operator.getitem or not isinstance(output.meta.get("val"), torch.Tensor):
            continue
        overwritten = _kind(branching) == "cond" and any(places[user] >= later for user in output.users)
        if overwritten or any(user.target == _VIEW for user in output.users):
            branching.append(output)  # a partitioner may have left it behind the next branch
            _copy(output, list(output.users))
            copied = True
    if copied:
        module.recompile()
    return copied


def _copy(value: Any, users: list[Any]) -> None:
    """Give users of a node a copy of its tensor."""
    with value.graph.inserting_after(value):
        order = list(value.meta["val"].dim_order())
        copy = value.graph.call_function(ops.edge.dim_order_ops._clone_dim_order.default, (value,), {"dim_order": order})
    copy.meta = dict(value.meta)
    for user in users:
        user.replace_input_with(value, copy)


def _kind(node: Any) -> str:
    """Return the name of an operator with branches or a loop, such as `cond`; else empty."""
    return node.target.name() if isinstance(node.target, HigherOrderOperator) and node.target.name() in _BRANCHING else ""
