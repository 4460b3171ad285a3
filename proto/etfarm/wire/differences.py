"""The warnings of inputs for which an exported program differs from its model in eager mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

PROGRAM_DIFFERS: Final = "PROGRAM_DIFFERS"
SIZE_ONE_DIFFERS: Final = "SIZE_ONE_DIFFERS"
"""Codes of the warnings in reports."""


def describe_examples(method: str, difference: str) -> str:
    """Return the warning of a difference for the example inputs, such as `output 1 has other values`."""
    return (
        f"The program of {method} differs from the model, called with the example inputs: {difference}. Accuracy is that of the "
        "program. An export runs forward once and keeps what Python computed, such as random numbers of random or NumPy, and "
        "branches on torch.compiler.is_exporting(); each input of a program has memory of its own; and an object, such as a "
        "cache, is rebuilt from its tensors. Compute such values before forward, or from inputs: for the number of tokens that a "
        "cache has seen, position_ids."
    )


def describe_sizes(method: str, sizes: Iterable[str]) -> str:
    """Return the warning of dynamic sizes of 1 and 0.

    Args:
        sizes: what differs, such as `dim 0 of 'x' has the size 1 (the output has other values)`.
    """
    return (
        f"The program of {method} differs from the model where {'; '.join(sizes)}. torch.export takes dynamic sizes as 2 or "
        "more, and fixes branches on smaller ones. Declare min=2 in the Dim, with a program of its own for smaller sizes. Or "
        "choose by a tensor that is made of the size: for x.shape[0], torch.where(torch.ones(x.shape[:1]).sum() == 1, a, b)."
    )
