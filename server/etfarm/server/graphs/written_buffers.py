"""The buffers that an exported program writes to. Does not import torch."""

from __future__ import annotations

from typing import Any


def changed_buffers(program: Any) -> set[str]:
    """Return the names of the buffers that a run of the program writes to, for a program of any dialect."""
    signature = program.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                for target in written if isinstance(written, list | tuple) else [written]:
                    changed.add(signature.inputs_to_buffers.get(_find_placeholder(target), ""))
    return changed - {""}


def _find_placeholder(node: Any) -> str:
    """Return the name of the placeholder at the start of a chain of views, or of the last node that is reached."""
    while getattr(node, "op", "") == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return str(getattr(node, "name", ""))
