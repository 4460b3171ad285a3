"""Python numbers as inputs of a model, which a program has as constants. Standard library only."""

from __future__ import annotations

from typing import Final

INPUT_FIXED: Final = "INPUT_FIXED"
"""Code of the warning in reports."""


def how_to_vary(kind: str, which: str = "it") -> str:
    """Return how a model can take another number in each call; empty if the input is not a number.

    Args:
        kind: the input's kind as in a program: `int`, `double` or another.
        which: what varies, in the sentence.
    """
    if kind == "int":
        how = "pass a tensor and index with it (self.k[:, pos] = x, with pos a tensor of positions)"
    elif kind == "double":
        how = "pass a tensor, such as torch.tensor(0.5)"
    else:
        return ""
    return f"To vary {which} between calls, {how}."
