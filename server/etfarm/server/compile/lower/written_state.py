"""Values that a program writes to its buffers and inputs, of which ExecuTorch copies each at the end of a run, in any order."""

from __future__ import annotations

from typing import Any

import torch

from etfarm.wire.written_inputs import viewed_placeholders

_MUTATIONS = ("BUFFER_MUTATION", "USER_INPUT_MUTATION")


def copy_values(program: Any) -> None:
    """Copy the values that are memory of a buffer or an input, as in a delay line, and those that are written twice.

    The copy at the end of a run may come after that to the memory itself, and ExecuTorch finds one output for each value.
    Source: executorch/exir/passes/insert_write_back_for_buffers_pass.py 1.5.1.

    Args:
        program: an exported program, which is changed; its operators may write themselves, or return the new values.
    """
    graph = program.graph
    views = viewed_placeholders(graph)
    written: set[Any] = set()
    changed = False
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default:
            continue
        to, value = node.args[:2]
        if isinstance(value, torch.fx.Node) and (value in written or views.get(value, frozenset()) - {to}):
            node.update_arg(1, _copy(graph, node, value))
            changed = True
        written.add(value)
    nodes = {node.name: node for node in graph.nodes}
    targets = program.graph_signature.inputs_to_buffers
    output = graph.output_node()
    for spec in program.graph_signature.output_specs:
        if spec.kind.name not in _MUTATIONS:
            continue
        value = nodes[spec.arg.name]
        own = value.op == "placeholder" and spec.target in (value.name, targets.get(value.name))
        if value in written or (views.get(value) and not own):
            copy = _copy(graph, output, value)
            place = program.graph_signature.output_specs.index(spec)
            results = list(output.args[0])
            results[place] = copy
            output.args = (tuple(results),)
            spec.arg.name = copy.name
            changed = True
        written.add(value)
    if changed:
        program.graph_module.recompile()


def _copy(graph: torch.fx.Graph, before: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta = dict(value.meta)
    return copy
