"""The reference for accuracy: a .pt2 run in eager PyTorch, before any quantization, on given inputs. Child side."""

from __future__ import annotations

import json
import logging
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from etfarm.server.compile import facts, loading, values
from etfarm.server.compile.explain import first_line
from etfarm.server.compile.inputs import check_inputs
from etfarm.server.compile.request import ReferenceRequest
from etfarm.server.compile.result import ReferenceResult
from etfarm.server.workers.faults import is_out_of_memory
from etfarm.wire import tensors
from etfarm.wire.errors import UserError
from etfarm.wire.tensors import Value

_log = logging.getLogger(__name__)


class ReferenceFailed(UserError):
    """Eager PyTorch refused the inputs: a guard of the export, mostly."""

    reason = "REFERENCE_FAILED"


def reference_outputs(request: ReferenceRequest, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: runs `request.model` on each of its inputs. Answers a ReferenceResult as JSON.

    Raises:
        NotAPt2, UnsafeModel, InputMismatch, ReferenceFailed: as they say.
    """
    torch.set_num_threads(request.threads)
    program = loading.load(request.model, folder)
    result: ReferenceResult = {"outputs": []}
    for index, path in enumerate(request.inputs):
        outputs = run_program(program, tensors.decode(path.read_bytes()))
        name = f"reference-{index}.ett"
        (folder / name).write_bytes(tensors.encode(outputs))
        result["outputs"].append(name)
    return json.dumps(result).encode()


def run_reference(pt2: Path, inputs: Sequence[Value]) -> list[Value]:
    """The flattened outputs of a .pt2 on flattened inputs, named like the nodes that make them.

    Call it in a jailed child only.

    Raises:
        NotAPt2, UnsafeModel, InputMismatch, ReferenceFailed: as they say.
    """
    with tempfile.TemporaryDirectory() as folder:
        return run_program(loading.load(pt2, Path(folder)), inputs)


def run_program(program: Any, inputs: Sequence[Value]) -> list[Value]:
    """`run_reference` of a program that is loaded already. Mutated buffers begin at their initial values each time.

    Raises:
        InputMismatch, ReferenceFailed: as they say.
    """
    check_inputs("forward", facts.of_exported(program), inputs)
    args, kwargs = values.to_arguments(program, [values.to_leaf(value) for value in inputs])
    try:
        with torch.no_grad():
            outputs = pytree.tree_leaves(program.module()(*args, **kwargs))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        traceback.print_exc()
        raise ReferenceFailed(
            f"PyTorch cannot run the model on these inputs: {first_line(error)}.", "Give inputs like the example inputs."
        ) from None
    names = values.output_names(program)
    return [values.to_value(name, leaf) for name, leaf in zip(names, outputs, strict=True)]
