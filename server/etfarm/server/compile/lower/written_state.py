"""Values that a program writes to its buffers and inputs, of which ExecuTorch copies each at the end of a run, in any order.

It also removes copies, and XNNPACK returns no value twice: `self.mean.mul_(0.9).add_(x); return self.mean.clone()` has one value
for the buffer and for the output. The same without clone() is lowered.
"""

from __future__ import annotations

from typing import Any

import torch

from etfarm.server.compile.program.places import all_nodes
from etfarm.server.graphs.views import name_of
from etfarm.wire.written_inputs import viewed_placeholders, written_placeholders

_MUTATIONS = ("BUFFER_MUTATION", "USER_INPUT_MUTATION")
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def cast_copies(program: Any) -> None:
    """Cast the values that `copy_` writes to memory of another dtype.

    When torch makes a program functional, a value that is written to all of a tensor replaces that, uncast. A later
    `self.cache.float()` would fail in an assertion of the dtype.

    Args:
        program: an exported program, which is changed.
    """
    for node in list(all_nodes(program)):
        if node.target is not torch.ops.aten.copy_.default or not isinstance(node.args[1], torch.fx.Node):
            continue
        to, value = (each.meta["val"] for each in node.args[:2])
        if to.dtype == value.dtype:
            continue
        with node.graph.inserting_before(node):
            cast = node.graph.call_function(torch.ops.aten.to.dtype, (node.args[1], to.dtype))
        cast.meta = {**node.meta, "val": value.to(to.dtype)}
        node.update_arg(1, cast)
        node.graph.owning_module.recompile()


def copy_values(program: Any) -> None:
    """Copy the values that are memory of another buffer or input that is written to, as in a delay line, or are written twice.

    The copy at the end of a run may come after that to the memory itself, and ExecuTorch finds one output for each value.
    Source: executorch/exir/passes/insert_write_back_for_buffers_pass.py 1.5.1.

    Args:
        program: an exported program, which is changed; its operators may write themselves, or return the new values.
    """
    graph, signature = program.graph, program.graph_signature
    functional = {spec.target for spec in signature.output_specs if spec.kind.name in _MUTATIONS}
    targets = signature.inputs_to_buffers
    changing = set(written_placeholders(graph)) | {
        node for node in graph.nodes if node.op == "placeholder" and targets.get(node.name, node.name) in functional
    }
    views = {node: placeholders & changing for node, placeholders in viewed_placeholders(graph).items()}
    written: set[Any] = set()
    changed = False
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.args[0].op != "placeholder":
            continue
        to, value = node.args[:2]
        if isinstance(value, torch.fx.Node) and (value in written or views.get(value, frozenset()) - {to}):
            node.update_arg(1, _copy(graph, node, value))
            changed = True
        written.add(value)
    nodes = {node.name: node for node in graph.nodes}
    output = graph.output_node()
    for place, spec in enumerate(signature.output_specs):
        if spec.kind.name not in _MUTATIONS:
            continue
        value = nodes[spec.arg.name]
        own = value.op == "placeholder" and spec.target in (value.name, targets.get(value.name))
        if value in written or (views.get(value) and not own):
            copy = _copy(graph, output, value)
            results = list(output.args[0])
            results[place] = copy
            output.args = (tuple(results),)
            spec.arg.name = copy.name
            changed = True
        written.add(value)
    if changed:
        program.graph_module.recompile()


def return_values(program: Any) -> None:
    """Return values themselves where the program returns copies of them, and only writes of other memory follow the copies.

    Args:
        program: an exported program, which is changed.
    """
    graph, signature = program.graph, program.graph_signature
    output = graph.output_node()
    functional = {spec.target for spec in signature.output_specs if spec.kind.name in _MUTATIONS}
    targets, views = signature.inputs_to_buffers, viewed_placeholders(graph)
    # ExecuTorch writes these at the end of a run; the program may write others there with copy_.
    written_last = {node for node in graph.nodes if node.op == "placeholder" and targets.get(node.name, node.name) in functional}
    needless: set[Any] = set()
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            if _written_in_place(node.args[1]) is not node.args[0]:
                written_last.add(node.args[0])
        elif _may_write(node):
            break
        elif _is_copy(node) and node.args[0].op == "call_function" and not views[node.args[0]] & written_last:
            needless.add(node)
    results = list(output.args[0])
    for place, spec in enumerate(signature.output_specs):
        value = results[place]
        while spec.kind.name == "USER_OUTPUT" and value in needless:
            value = value.args[0]
        if value is not results[place]:
            results[place] = value
            spec.arg.name = value.name
    output.args = (tuple(results),)
    graph.eliminate_dead_code(lambda node: not _is_copy(node))
    program.graph_module.recompile()


def _written_in_place(value: Any) -> Any:
    """Return the tensor that operators such as `add_` have written to and returned; a value itself if it is none of theirs."""
    while _may_write(value) and name_of(value).endswith("_"):
        value = value.args[0]
    return value


def _is_copy(node: torch.fx.Node) -> bool:
    return node.target in _COPIES and not node.kwargs


def _may_write(node: torch.fx.Node) -> bool:
    """Return whether an operator changes its arguments, or is a region, a branch or a loop, whose operators may."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema.is_mutable) if schema is not None else isinstance(node.target, torch._ops.HigherOrderOperator)


def _copy(graph: torch.fx.Graph, before: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta = dict(value.meta)
    return copy
