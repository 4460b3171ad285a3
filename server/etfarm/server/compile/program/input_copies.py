"""Copies of the inputs that an exported program writes to, so that it leaves its caller's tensors as they are.

ExecuTorch would return the changed inputs before the model's own outputs, and refuses some programs whose first operator works in
place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import TensorArgument

from etfarm.server.compile.program import loading
from etfarm.wire.written_inputs import is_mutation, written_inputs


def copy_written_inputs(program: Any) -> dict[str, int]:
    """Let a program work on copies of the inputs that it writes to, in place; return the copies' sizes in bytes by input.

    The size is that of the largest inputs if dims are dynamic. It is 0 without a copy: a program without in-place operators
    computes the changed values as further outputs, which are removed.
    """
    writers = written_inputs(program)
    if not writers:
        return {}
    _drop_mutations(program)
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    last = list(placeholders.values())[-1]
    copies: dict[str, int] = {}
    for name, writer in writers.items():
        placeholder = placeholders[name]
        is_in_place = writer.op == "call_function" and _writes(writer)
        copies[name] = _size_bytes(program, placeholder.meta["val"]) if is_in_place else 0
        if is_in_place:
            _insert_copy(program, placeholder, writer, last)
    program.graph.lint()
    program.graph_module.recompile()
    return copies


def describe_copies(method: str, copies: Mapping[str, int]) -> str:
    """Return the warning about the inputs that `copy_written_inputs` found, copied or not."""
    sentences = []
    if copied := {name: size for name, size in copies.items() if size}:
        listed = ", ".join(f"{name!r} ({size:,} bytes)" for name, size in copied.items())
        inputs, copy = ("inputs", "copies") if len(copied) > 1 else ("input", "a copy")
        sentences.append(
            f"{method} writes to its {inputs} {listed}. The program works on {copy} made in every run. To avoid that, write "
            "out-of-place operators, such as x = x.add(1) for x.add_(1). To get what was written, return it from forward, or "
            "give a factory with --keep-mutations (ModelSource: keep_mutations=True)."
        )
    if others := [repr(name) for name in copies if name not in copied]:
        sentences.append(
            f"{method} changes its input{'s' if len(others) > 1 else ''} {', '.join(others)} in PyTorch; the program neither "
            "changes nor copies them. Return the new values from forward if you need them."
        )
    return " ".join(sentences)


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _insert_copy(program: Any, placeholder: Any, writer: Any, after: Any) -> None:
    value = placeholder.meta["val"]
    with program.graph.inserting_after(after):
        copy = program.graph.call_function(torch.ops.aten.clone.default, (placeholder,))
    with value.fake_mode:
        copy.meta = {"val": value.clone()}
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
        if key in writer.meta:
            copy.meta[key] = writer.meta[key]  # the line that makes the copy necessary
    placeholder.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    for spec in program.graph_signature.output_specs:
        if isinstance(spec.arg, TensorArgument) and spec.arg.name == placeholder.name:
            spec.arg = TensorArgument(name=copy.name)
    for entry in program.module_call_graph:
        outputs = entry.signature.outputs if entry.signature is not None else []
        outputs[:] = [
            TensorArgument(name=copy.name) if getattr(each, "name", "") == placeholder.name else each for each in outputs
        ]


def _drop_mutations(program: Any) -> None:
    """Remove the changed inputs from the outputs of a program without in-place operators, which computes them separately."""
    specs, output = program.graph_signature.output_specs, program.graph.output_node()
    kept = [(spec, node) for spec, node in zip(specs, output.args[0], strict=True) if not is_mutation(spec)]
    specs[:] = [spec for spec, _ in kept]
    output.args = (tuple(node for _, node in kept),)


def _size_bytes(program: Any, value: torch.Tensor) -> int:
    sizes = (loading.bounds(program, size)[1] if isinstance(size, torch.SymInt) else size for size in value.shape)
    return int(math.prod(0 if size is None else int(size) for size in sizes) * value.element_size())
