"""The comparison of two numbers."""

from __future__ import annotations

import math

from etfarm.wire.report import Json


def number(base: float | None, candidate: float | None) -> Json | None:
    """Return a NUMBER; None if both are None. `ratio` is None if one is None or not above 0."""
    if base is None and candidate is None:
        return None
    both = base is not None and candidate is not None
    return {
        "base": base,
        "candidate": candidate,
        "change": finite(candidate - base) if both else None,  # type: ignore[operator]
        "ratio": ratio(base, candidate),
    }


def ratio(base: float | None, candidate: float | None) -> float | None:
    """Return candidate / base for two numbers above 0; else None."""
    if base is None or candidate is None or base <= 0 or candidate <= 0:
        return None
    quotient = finite(candidate / base)
    return quotient if quotient else None


def finite(value: float) -> float | None:
    """Return `value`; None for a value that JSON cannot represent."""
    return value if math.isfinite(value) else None
