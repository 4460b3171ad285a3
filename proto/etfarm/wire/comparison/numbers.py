"""The comparison of two numbers, and its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from etfarm.v1 import comparison_pb2

_MAX_DECIMALS: Final = 12
_INT64: Final = range(-(1 << 63), 1 << 63)


def measure(base: float | None, candidate: float | None) -> comparison_pb2.MeasureChange | None:
    """Return two measured numbers with their change; None if neither is known."""
    if base is None and candidate is None:
        return None
    change = None if base is None or candidate is None else finite(candidate - base)
    return comparison_pb2.MeasureChange(base=base, candidate=candidate, change=change, ratio=ratio(base, candidate))


def count(base: int | None, candidate: int | None) -> comparison_pb2.CountChange | None:
    """Return two whole numbers with their change; None if neither is known. A sum beyond 64 bits is left out."""
    if base is None and candidate is None:
        return None
    change = None if base is None or candidate is None else candidate - base
    held = [each if each is not None and each in _INT64 else None for each in (base, candidate, change)]
    return comparison_pb2.CountChange(base=held[0], candidate=held[1], change=held[2], ratio=ratio(base, candidate))


def ratio(base: float | None, candidate: float | None) -> float | None:
    """Return candidate / base for two numbers above 0; else None."""
    if base is None or candidate is None or base <= 0 or candidate <= 0:
        return None
    quotient = finite(candidate / base)
    return quotient if quotient else None


def finite(value: float) -> float | None:
    """Return `value`; None for a value that JSON cannot represent."""
    return value if math.isfinite(value) else None


def ratio_text(value: float, ends: Sequence[float] | None = None) -> str:
    """Return a ratio with its interval if it is known: `0.912x [0.905, 0.919]`."""
    interval = f" [{ratio_digits(ends[0])}, {ratio_digits(ends[1])}]" if ends else ""
    return f"{ratio_digits(value)}x{interval}"


def ratio_digits(value: float) -> str:
    """Return a ratio with three decimals, or with three significant digits where these are more: `0.912`, `0.0123`."""
    exponent = int(f"{value:.2e}".partition("e")[2])  # of the value as rounded to three digits
    return f"{value:.{min(_MAX_DECIMALS, max(3, 2 - exponent))}f}"
