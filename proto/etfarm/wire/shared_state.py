"""Buffers that several methods of a model share: the client marks them by their names, by which the server plans one memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from etfarm.wire.written_inputs import written_placeholders

PREFIX: Final = "etfarm_shared."
"""Beginning of the name of a buffer that has equal names in all methods that share it."""


def rename_buffers(program: Any, names: Mapping[str, str]) -> None:
    """Give buffers of an exported program other names, by their present names, in place.

    A constant or a parameter becomes a buffer.
    """
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.kind.name in ("BUFFER", "BUFFER_MUTATION", "CONSTANT_TENSOR", "PARAMETER") and spec.target in names:
            spec.target = names[spec.target]
            if spec.kind.name in ("CONSTANT_TENSOR", "PARAMETER"):
                spec.persistent = spec.kind.name == "PARAMETER"
                spec.kind = type(spec.kind).BUFFER
    for values in (program._state_dict, program._constants):
        # A buffer is no nn.Parameter.
        renamed = {names.get(name, name): value.detach() if name in names else value for name, value in values.items()}
        values.clear()
        values.update(renamed)


def buffer_names(program: Any) -> dict[str, str]:
    """Return the names of an exported program's buffers by the names of their placeholders."""
    specs = program.graph_signature.input_specs
    return {spec.arg.name: spec.target for spec in specs if spec.kind.name == "BUFFER"}


def written_buffers(program: Any) -> set[str]:
    """Return the names of the buffers that a run of an exported program changes."""
    names = buffer_names(program)
    operators = {names[node.name] for node in written_placeholders(program.graph) if node.name in names}
    return operators | set(program.graph_signature.buffers_to_mutate.values())


def keep_constants(program: Any) -> None:
    """Make buffers of the constants and parameters that an exported program writes to, as it would forget what it wrote."""
    signature = program.graph_signature
    constants = {**signature.inputs_to_lifted_tensor_constants, **signature.inputs_to_parameters}
    names = [constants[node.name] for node in written_placeholders(program.graph) if node.name in constants]
    rename_buffers(program, {name: name for name in names})
