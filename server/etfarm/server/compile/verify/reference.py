"""The reference for accuracy: a .pt2 run in eager PyTorch, before any quantization, on given inputs. Child side."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.inspect import facts
from etfarm.server.compile.program import values
from etfarm.server.compile.program.explain import first_line
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire.errors import UserError
from etfarm.wire.tensors import Value

_log = logging.getLogger(__name__)


class ReferenceFailed(UserError):
    """Eager PyTorch refused the inputs: a guard of the export, mostly.

    Args:
        why: PyTorch's reason in one line.
    """

    reason = "REFERENCE_FAILED"

    def __init__(self, why: str) -> None:
        super().__init__(f"PyTorch cannot run the model on these inputs: {why}.", "Give inputs like the example inputs.", why=why)
        self.why = why

    @property
    def is_guard(self) -> bool:
        """Whether the export's guards refused sizes; other sizes of the same range may be allowed."""
        return self.why.startswith("Guard failed")


def run_program(program: Any, inputs: Sequence[Value]) -> list[Value]:
    """The flattened outputs of a program on flattened inputs, named like the nodes that make them.

    Buffers that the model changes are as before afterwards.

    Raises:
        InputMismatch, ReferenceFailed: as they say.
    """
    check_inputs("forward", facts.of_exported(program), inputs)
    args, kwargs = values.to_arguments(program, [values.to_leaf(value) for value in inputs])
    try:
        with torch.no_grad(), unchanged(program):
            outputs = pytree.tree_leaves(program.module()(*args, **kwargs))
            names = values.output_names(program)
            # While the buffers still hold what the run left: an output may be one of them.
            return [values.to_value(name, leaf) for name, leaf in zip(names, outputs, strict=True)]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise ReferenceFailed(first_line(error).rstrip(".")) from None


def changed_buffers(program: Any) -> set[str]:
    """Names of the buffers that a run of the program writes to, in whatever dialect it is."""
    signature = program.graph_signature
    changed = set(signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
                for one in written if isinstance(written, list | tuple) else [written]:
                    changed.add(signature.inputs_to_buffers.get(_base(one), ""))
    return changed - {""}


@contextmanager
def unchanged(program: Any) -> Iterator[None]:
    # ep.module() shares its buffers with the program: without this, a run would change what is lowered afterwards.
    held = [program.state_dict.get(name, program.constants.get(name)) for name in sorted(changed_buffers(program))]
    copies = [(buffer, buffer.clone()) for buffer in held if buffer is not None]
    try:
        yield
    finally:
        for buffer, copy in copies:
            buffer.copy_(copy)


def _base(node: Any) -> str:
    """The name of the placeholder that a chain of views begins at; that of the last one where there is none."""
    while getattr(node, "op", "") == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return str(getattr(node, "name", ""))
