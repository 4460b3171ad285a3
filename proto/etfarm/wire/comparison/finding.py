"""What a gate finds: reasons why it does not pass, and notes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A reason why a gate does not pass, or a note."""

    code: str
    message: str
    is_reason: bool = True


def percent(share: float) -> str:
    """Return a share that is reached at least: `5.0 %`, `12 %`."""
    percent = share * 100
    # Round down, so that "at least" stays true.
    return f"{math.floor(percent * 10) / 10:.1f} %" if percent < 10 else f"{math.floor(percent):,} %"
