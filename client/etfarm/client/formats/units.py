"""Numbers as text with their unit.

These are pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Final

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_MIN_DIGITS: Final = 3
_MAX_DIGITS: Final = 6
"""Numbers of significant digits of an estimate."""
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits and no exponent: 1.84, 18.4, 184, 1840."""
    if value == 0:
        return "0"
    rounded = float(f"{abs(value):.{digits - 1}e}")  # 9.996 has two digits before the point, as 10.0
    before = len(str(int(rounded))) if rounded >= 1 else 0
    text = f"{value:.{max(0, digits - before)}f}" if before else f"{value:.{digits - 1}g}"
    return text if "e" not in text else f"{value:.{digits}f}"


def unit_of(value_ns: float) -> tuple[float, str]:
    """Return the unit in which a time in nanoseconds is at least 1."""
    return next((unit for unit in _TIMES if value_ns >= unit[0]), _TIMES[-1])


def time(value_ns: float | None) -> str:
    """Return a duration: `1.84 ms`; `-` for None."""
    if value_ns is None:
        return "-"
    scale, unit = unit_of(value_ns)
    return f"{significant(value_ns / scale)} {unit}"


def estimate(value_ns: float, low_ns: float, high_ns: float) -> tuple[str, str]:
    """Return an estimated duration and its interval, with equally many decimals: `1.84 ms` and `[1.82, 1.86]`.

    The last digit is the first one of half the interval's width: fewer digits would hide how exact the estimate is, and more
    would be noise. There are 3 significant digits at least, as in `time`, and 6 at most.
    """
    scale, unit = unit_of(value_ns)
    value = value_ns / scale
    decimals = _decimals(value, (high_ns - low_ns) / 2 / scale)
    return f"{value:.{decimals}f} {unit}", f"[{low_ns / scale:.{decimals}f}, {high_ns / scale:.{decimals}f}]"


def difference(value_ns: float, ends_ns: Sequence[float] | None) -> str:
    """Return a difference of two durations with its sign, and its interval if known: `-1.52 ms [-3.60, +0.56]`."""
    if not ends_ns:
        return f"{'+' if value_ns > 0 else '-'}{time(abs(value_ns))}"
    low_ns, high_ns = ends_ns
    # The difference may be close to 0, so the largest number determines the unit.
    largest_ns = max(abs(value_ns), abs(low_ns), abs(high_ns))
    scale, unit = unit_of(largest_ns)
    decimals = _decimals(largest_ns / scale, (high_ns - low_ns) / 2 / scale)
    value, low, high = (f"{each / scale:+.{decimals}f}" for each in (value_ns, low_ns, high_ns))
    return f"{value} {unit} [{low}, {high}]"


def _decimals(value: float, half_width: float) -> int:
    """Return the number of decimals of a value whose interval has this half width, as `estimate` describes."""
    magnitude = math.floor(math.log10(value)) if value > 0 else 0
    decimals = _MIN_DIGITS - 1 - magnitude
    if half_width > 0:
        decimals = max(decimals, min(-math.floor(math.log10(half_width)), _MAX_DIGITS - 1 - magnitude))
    return max(0, decimals)


def rate(tokens_per_s: float | None, ends: Sequence[float] | None = None) -> tuple[str, str]:
    """Return a rate and its 95 % interval, with equally many decimals: `112.4 tokens/s` and `[111.9, 112.9]`.

    The interval is empty if it is unknown, and the rate `-` if it was not measured.
    """
    if tokens_per_s is None:
        return "-", ""
    if not ends:
        return f"{_grouped(tokens_per_s, _decimals(tokens_per_s, 0.0))} tokens/s", ""
    low, high = ends
    decimals = _decimals(tokens_per_s, (high - low) / 2)
    return f"{_grouped(tokens_per_s, decimals)} tokens/s", f"[{_grouped(low, decimals)}, {_grouped(high, decimals)}]"


def _grouped(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}"


def median(p50_ns: float, ends_ns: Sequence[float]) -> tuple[str, str]:
    """Return a median and its 95 % interval, as `estimate`; an empty text for an unknown interval.

    Args:
        ends_ns: the interval's ends; empty if they are unknown.
    """
    return estimate(p50_ns, *ends_ns) if len(ends_ns) == 2 else (time(p50_ns), "")


def column(values_ns: list[float | None]) -> list[str]:
    """Return durations of one column in one unit, with the same number of decimals; empty for None.

    A value that would wrongly show as 0 keeps its own unit, `34.0 ns`.
    """
    largest = max((value for value in values_ns if value is not None), default=0.0)
    scale, unit = (1e6, "ms") if largest >= 1e7 else (1e3, "µs") if largest >= 1e3 else (1.0, "ns")
    decimals = 2 if unit == "ms" else 0 if largest / scale >= 1e3 else 1

    def shown(value_ns: float) -> str:
        number = f"{value_ns / scale:.{decimals}f}"
        return f"{number} {unit}" if float(number) else time(value_ns)

    return ["" if value is None else shown(value) for value in values_ns]


def milliseconds(value_ms: float | None) -> str:
    """Return a duration that was measured in milliseconds."""
    return "-" if value_ms is None else time(value_ms * 1e6)


def size(value_bytes: int | None) -> str:
    """Return a size: `3.2 MiB`; `-` for None."""
    if value_bytes is None:
        return "-"
    for scale, unit in _SIZES:
        if value_bytes >= scale:
            return f"{significant(value_bytes / scale)} {unit}"
    return f"{value_bytes} B"


def percent(share: float | None) -> str:
    """Return a share of 0 to 1 as a percentage: `41.2 %`; empty for None. Only the whole is `100.0 %`."""
    if share is not None and 0.9995 <= share < 1:
        return "> 99.9 %"
    return "" if share is None else f"{share * 100:.1f} %"


def ago(then: datetime | None, now: datetime) -> str:
    """Return the time since an instant: `now`, `12 s ago`, `3 h ago`, and after a week the date."""
    if then is None:
        return "-"
    seconds = (now - then).total_seconds()
    if seconds < 5:
        return "now"
    for limit, scale, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h"), (604_800, 86_400, "d")):
        if seconds < limit:
            return f"{int(seconds / scale)} {unit} ago"
    return then.astimezone().strftime("%Y-%m-%d")


def clock(seconds: float) -> str:
    """Return a running time: `3.2 s`, `1:07`, and from an hour on `2:01:07`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 cell`, `2 cells`, `3 processes`."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def without_end(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, cut at its end."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def without_start(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, cut at its start: the end of a path says more."""
    return text if len(text) <= width else f"…{text[len(text) - max(0, width - 1) :]}"


def without_middle(text: str, width: int) -> str:
    """Return `text` in at most `width` characters, with its start and its last few: `Convolution (NHW… IGEMM #2`."""
    if len(text) <= width:
        return text
    tail = min(9, max(0, width - 1) // 2)
    return f"{text[: max(0, width - 1 - tail)]}…{text[len(text) - tail :]}"
