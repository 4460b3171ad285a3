"""What to do about conditions of torch.export on the sizes of a dynamic dim. Standard library only."""

from __future__ import annotations

import re
from typing import Final

_DIM: Final = r"(?:L|inputs)\['\w+'\](?:\[[^\]]+\])*(?:\.size\(\)|\.shape)\[\d+\]"
_EXCLUDED: Final = re.compile(
    r"in the specified range (?:(\d+) <= )?\w+(?: <= (\d+))? "
    rf"satisfy the generated guard (?:(\d+) != {_DIM}|{_DIM} != (\d+))$"
)
"""One size of one dim that torch.export 2.13 excludes, as symbolic_shapes.py words it. Without a minimum, sizes begin at 2."""

_FLOATS: Final = re.compile(r"\bmath\.[a-z]|\bsym_float\b|\bround\(| \*\* | [&|^] ")
"""Arithmetic in the guards of torch.export 2.13 whose results it fixes."""

WHOLE_NUMBERS: Final = (
    "Compute sizes with whole numbers: x.shape[0] // 2 for int(x.shape[0] * 0.5), -(-n // 4) for math.ceil(n / 4), "
    "(3 * n + 5) // 10 for round(n * 0.3), n > 3 for n * 0.5 > 1.5, n % 2 for n & 1. For slices to such a size, give a multiple "
    "of the divisor as the dim, with a minimum: 2 * Dim('k', min=2, max=8)."
)
"""Remedy for sizes that are computed in floats."""


def computes_in_floats(guard: str) -> bool:
    """Return whether a condition on sizes has arithmetic whose results torch.export fixes, above all that of floats."""
    return _FLOATS.search(guard) is not None


def why_floats(guard: str) -> str:
    """Return why a dim with such a condition cannot be dynamic, as the rest of a sentence."""
    return f"the export fixes what the model computes of it other than with +, -, *, // and %: {guard}"


def how_to_exclude(why: str) -> str:
    """Return which bound a dim needs instead, like `a smaller max (7)`; empty if `why` does not exclude sizes.

    Args:
        why: torch's sentence without its full stop.
    """
    match = _EXCLUDED.search(why)
    if match is None:
        return "a larger min or a smaller max" if "!=" in why else ""
    size = int(match[3] or match[4])
    low, high = int(match[1] or 2), int(match[2]) if match[2] else None
    if size == high:
        return f"a smaller max ({size - 1})"
    if size <= low:
        return f"a larger min ({size + 1})"
    return f"a larger min ({size + 1}) or a smaller max ({size - 1})"
