"""The reference for accuracy: an unquantized .pt2, run in eager PyTorch on the same inputs. For children."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.inspect.signature import of_exported
from etfarm.server.compile.program import values
from etfarm.server.compile.program.descriptions import first_line
from etfarm.server.graphs import call_sequence
from etfarm.server.graphs.call_sequence import unchanged
from etfarm.server.workers.errors import is_out_of_memory
from etfarm.wire.errors import UserError
from etfarm.wire.tensors import Value

_log = logging.getLogger(__name__)


class ReferenceFailed(UserError):
    """Eager PyTorch cannot run the model on the inputs, mostly because a guard of the export refuses them.

    Args:
        why: PyTorch's reason in one line.
    """

    reason = "REFERENCE_FAILED"

    def __init__(self, why: str) -> None:
        super().__init__(f"PyTorch cannot run the model on these inputs: {why}.", "Give inputs like the example inputs.", why=why)
        self.why = why

    @property
    def is_guard(self) -> bool:
        """Whether a guard of the export refused sizes; other sizes in the same range may be allowed."""
        return self.why.startswith("Guard failed")


def run_program(program: Any, inputs: Sequence[Value]) -> list[Value]:
    """Return the flattened outputs of a program on flattened inputs, by their names in reports.

    Buffers that the model changes are restored afterwards.

    Raises:
        InputMismatch: the inputs do not fit the program.
        ReferenceFailed: eager PyTorch cannot run the program on the inputs.
    """
    check_inputs("forward", of_exported(program), inputs)
    args, kwargs = values.to_arguments(program, [values.to_leaf(value) for value in inputs])
    try:
        with torch.no_grad(), unchanged(program):
            outputs = pytree.tree_leaves(program.module()(*args, **kwargs))
            names = values.output_names(program)
            # Before the buffers are restored, because an output may be a buffer.
            return [values.to_value(name, leaf) for name, leaf in zip(names, outputs, strict=True)]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise ReferenceFailed(first_line(error).rstrip(".")) from None


def run_calls(
    programs: Mapping[str, Any], calls: Sequence[tuple[str, Sequence[Value]]], shared: Collection[str]
) -> list[list[Value]]:
    """Return the outputs of each call of methods whose buffers keep their state.

    Buffers that the methods change are restored afterwards.

    Args:
        shared: names of buffers that are one in all methods that have them.

    Raises:
        InputMismatch, ReferenceFailed: as `run_program`.
    """
    for method, inputs in calls:
        check_inputs(method, of_exported(programs[method]), inputs)
    leaves = ((method, [values.to_leaf(value) for value in inputs]) for method, inputs in calls)
    try:
        return [
            [values.to_value(name, leaf) for name, leaf in zip(values.output_names(programs[method]), outputs, strict=True)]
            for (method, _), outputs in zip(calls, call_sequence.run_calls(programs, leaves, shared), strict=True)
        ]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise ReferenceFailed(first_line(error).rstrip(".")) from None
