"""What to do about a size that torch.export excludes from the range of a dynamic dim. Standard library only."""

from __future__ import annotations

import re
from typing import Final

_DIM: Final = r"(?:L|inputs)\['\w+'\](?:\[[^\]]+\])*(?:\.size\(\)|\.shape)\[\d+\]"
_EXCLUDED: Final = re.compile(
    r"in the specified range (?:(\d+) <= )?\w+(?: <= (\d+))? "
    rf"satisfy the generated guard (?:(\d+) != {_DIM}|{_DIM} != (\d+))$"
)
"""One size of one dim that torch.export 2.13 excludes, as symbolic_shapes.py words it. Without a minimum, sizes begin at 2."""


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
