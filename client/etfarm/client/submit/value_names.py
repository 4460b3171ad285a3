"""Names of a program's inputs and outputs, which come from its model: the program itself has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etfarm.wire.output_names import distinct_names
from etfarm.wire.tensors import Value


@dataclass(frozen=True)
class ValueNames:
    """Names by method, in flattened order; a method whose names are unknown has none."""

    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the arguments: `x`, `state_0`, `options_mask`."""
    outputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the outputs, see `etfarm.wire.output_names`."""

    def __bool__(self) -> bool:
        """Return whether any name is known."""
        return any(self.inputs.values()) or any(self.outputs.values())

    def name_outputs(self, method: str, values: Sequence[Value]) -> list[Value]:
        """Return a method's outputs with their names, as they are where these are unknown."""
        names = self.outputs.get(method, ())
        if len(names) != len(values):
            return list(values)
        return [replace(value, name=name) for value, name in zip(values, distinct_names(names), strict=True)]
