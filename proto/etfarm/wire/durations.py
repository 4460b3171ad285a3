"""Durations as users write them: a number and its unit."""

from __future__ import annotations

import re
from typing import Final

_PERIOD: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([smhd])", re.ASCII)
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def read_period_s(text: str) -> float | None:
    """Return a duration such as `90s`, `30m`, `2h` or `1d` in seconds; None if the text is none."""
    match = _PERIOD.fullmatch(text.strip())
    return float(match[1]) * _UNITS_S[match[2]] if match else None
