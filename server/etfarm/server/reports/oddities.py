"""Step 9, in the jailed child: what is odd about a run's inputs, though a program may take it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from etfarm.wire import tensors
from etfarm.wire.tensors import Scalar, Value


def not_a_number(inputs: Iterable[Value]) -> str:
    """A sentence about the inputs that have NaN, empty where none has."""
    told = []
    for index, value in enumerate(inputs):
        if isinstance(value, Scalar) and not isinstance(value.value, float):
            continue
        array = np.asarray(value.value) if isinstance(value, Scalar) else tensors.to_array(value)
        # bfloat16 and the 8-bit floats are no inexact dtypes to numpy, which knows their NaN all the same.
        count = 0 if array.dtype.kind in "biu" else int(np.isnan(array).sum())
        if count:
            told.append(f"{count} of {array.size} element{'s' if array.size > 1 else ''} of {value.name or index!r}")
    return f"The inputs have NaN: {', '.join(told)}. What is computed from it is NaN as well." if told else ""
