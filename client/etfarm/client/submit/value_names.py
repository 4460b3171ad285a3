"""Names of a program's inputs and outputs, and the sizes that its inputs may have: all that only its model has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from etfarm.wire.pt2 import InputType
from etfarm.wire.tensors import Value

_NAME: Final = re.compile(r"(?!.*\.(?:dtype|dim_order)$)[^\W\d][\w.-]{0,199}")
"""A name that can be a key of an .npz: no position, no sibling's key, and no part of a path."""


@dataclass(frozen=True)
class ValueNames:
    """Names by method, in flattened order; a method whose names are unknown has none."""

    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the arguments: `x`, `state_0`, `options_mask`."""
    outputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Keys and fields of the outputs: `logits`, `hidden_states_0`; the position as text for an output without one."""
    types: Mapping[str, Sequence[InputType | None]] = field(default_factory=dict)
    """Types parallel to `inputs`, as far as they are known."""
    relations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Relations between the sizes of the inputs, see `etfarm.wire.size_relations`."""

    def __bool__(self) -> bool:
        """Return whether any name is known."""
        return any(self.inputs.values()) or any(self.outputs.values())

    def name_outputs(self, method: str, values: Sequence[Value]) -> list[Value]:
        """Return a method's outputs with their names, as they are where these are unknown.

        An output whose name is another one's, too, or could not be a key of a file, has its position.
        """
        names = self.outputs.get(method, ())
        if len(names) != len(values):
            return list(values)
        usable = [_NAME.fullmatch(name) is not None and names.count(name) == 1 for name in names]
        return [
            replace(value, name=name if is_usable else str(place))
            for place, (value, name, is_usable) in enumerate(zip(values, names, usable, strict=True))
        ]
