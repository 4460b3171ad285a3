"""Names of a program's inputs and outputs, and the sizes that its inputs may have: all that only its model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from etfarm.wire.output_names import distinct_names
from etfarm.wire.pt2 import InputType
from etfarm.wire.tensors import Value


@dataclass(frozen=True)
class ValueNames:
    """Names by method, in flattened order; a method whose names are unknown has none."""

    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the arguments: `x`, `state_0`, `options_mask`."""
    outputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the outputs, see `etfarm.wire.output_names`."""
    types: Mapping[str, Sequence[InputType | None]] = field(default_factory=dict)
    """Types parallel to `inputs`, as far as they are known."""
    relations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Relations between the sizes of the inputs, see `etfarm.wire.size_relations`."""

    def __bool__(self) -> bool:
        """Return whether any name is known."""
        return any(self.inputs.values()) or any(self.outputs.values())

    def name_outputs(self, method: str, values: Sequence[Value]) -> list[Value]:
        """Return a method's outputs with their names, as they are where these are unknown."""
        names = self.outputs.get(method, ())
        if len(names) != len(values):
            return list(values)
        return [replace(value, name=name) for value, name in zip(values, distinct_names(names), strict=True)]
