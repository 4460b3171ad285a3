"""The warning of dynamic sizes of 1 and 0 at which an exported program differs from its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SIZE_ONE_DIFFERS: Final = "SIZE_ONE_DIFFERS"
"""Code of the warning in reports."""


def describe(method: str, sizes: Iterable[str]) -> str:
    """Return the warning.

    Args:
        sizes: what differs, such as `dim 0 of 'x' has the size 1 (the output has other values)`.
    """
    return (
        f"The program of {method} differs from the model where {'; '.join(sizes)}. torch.export takes dynamic sizes as 2 or "
        "more, and fixes branches on smaller ones. Declare min=2 in the Dim, with a program of its own for smaller sizes. Or "
        "choose by a tensor that is made of the size: for x.shape[0], torch.where(torch.ones(x.shape[:1]).sum() == 1, a, b)."
    )
