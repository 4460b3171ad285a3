"""Buffers that several methods of a model share: the client marks them by their names, by which the server plans one memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PREFIX: Final = "etfarm_shared."
"""Beginning of the name of a buffer that has equal names in all methods that share it."""


def rename_buffers(program: Any, names: Mapping[str, str]) -> None:
    """Give buffers of an exported program other names, by their present names, in place."""
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.kind.name in ("BUFFER", "BUFFER_MUTATION") and spec.target in names:
            spec.target = names[spec.target]
    for values in (program._state_dict, program._constants):
        renamed = {names.get(name, name): value for name, value in values.items()}
        values.clear()
        values.update(renamed)


def buffer_names(program: Any) -> dict[str, str]:
    """Return the names of an exported program's buffers by the names of their placeholders."""
    specs = program.graph_signature.input_specs
    return {spec.arg.name: spec.target for spec in specs if spec.kind.name == "BUFFER"}
