"""Durations and sizes as users write them: a number and its unit."""

from __future__ import annotations

import re
from typing import Final

_PERIOD: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([smhd])", re.ASCII)
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SIZE: Final = re.compile(r"([0-9]{1,6}) ?(MiB|GiB|TiB)", re.ASCII)
SIZE_SHIFTS: Final = {"TiB": 40, "GiB": 30, "MiB": 20}
"""The units of sizes, largest first, each with its power of two."""


def read_period_s(text: str) -> float | None:
    """Return a duration such as `90s`, `30m`, `2h` or `1d` in seconds; None if the text is none."""
    match = _PERIOD.fullmatch(text.strip())
    return float(match[1]) * _UNITS_S[match[2]] if match else None


def read_size(text: str) -> int | None:
    """Return a size such as `500MiB`, `200GiB` or `2TiB` in bytes; None if the text is none."""
    match = _SIZE.fullmatch(text)
    return int(match[1]) << SIZE_SHIFTS[match[2]] if match else None
