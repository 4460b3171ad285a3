"""Step 10, client: numbers as people read them, with their unit. Pure functions."""

from __future__ import annotations

from datetime import datetime

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def significant(value: float, digits: int = 3) -> str:
    """`value` with so many digits that say something, and no exponent: 1.84, 18.4, 184, 1840."""
    if value == 0:
        return "0"
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    text = f"{value:.{max(0, digits - before)}f}" if before else f"{value:.{digits - 1}g}"
    return text if "e" not in text else f"{value:.{digits}f}"


def unit_of(value_ns: float) -> tuple[float, str]:
    """The unit in which a time of so many nanoseconds is at least 1."""
    return next((unit for unit in _TIMES if value_ns >= unit[0]), _TIMES[-1])


def time(value_ns: float | None) -> str:
    """A duration: `1.84 ms`; `-` for None."""
    if value_ns is None:
        return "-"
    scale, unit = unit_of(value_ns)
    return f"{significant(value_ns / scale)} {unit}"


def interval(low_ns: float, high_ns: float, like_ns: float) -> str:
    """Two durations in the unit that `like_ns` has: `[1.82, 1.86]`."""
    scale, _ = unit_of(like_ns)
    low, high = low_ns / scale, high_ns / scale
    # Two ends that look the same say less than they know.
    digits = 3 if low == high or significant(low) != significant(high) else 5
    return f"[{significant(low, digits)}, {significant(high, digits)}]"


def column(values_ns: list[float | None]) -> list[str]:
    """Durations of one column, in one unit and with the same number of decimals, but for what would be 0 in it and is not:
    that has its own, `34.0 ns`; empty for None."""
    largest = max((value for value in values_ns if value is not None), default=0.0)
    scale, unit = (1e6, "ms") if largest >= 1e7 else (1e3, "µs") if largest >= 1e3 else (1.0, "ns")
    decimals = 2 if unit == "ms" else 0 if largest / scale >= 1e3 else 1

    def shown(value_ns: float) -> str:
        number = f"{value_ns / scale:.{decimals}f}"
        return f"{number} {unit}" if float(number) else time(value_ns)

    return ["" if value is None else shown(value) for value in values_ns]


def milliseconds(value_ms: float | None) -> str:
    """A duration that was measured in milliseconds."""
    return "-" if value_ms is None else time(value_ms * 1e6)


def size(value_bytes: int | None) -> str:
    """A size: `3.2 MiB`; `-` for None."""
    if value_bytes is None:
        return "-"
    for scale, unit in _SIZES:
        if value_bytes >= scale:
            return f"{significant(value_bytes / scale)} {unit}"
    return f"{value_bytes} B"


def percent(share: float | None) -> str:
    """A share of 0 to 1: `41.2 %`; empty for None."""
    return "" if share is None else f"{share * 100:.1f} %"


def ago(then: datetime | None, now: datetime) -> str:
    """How long ago an instant is: `now`, `12 s ago`, `3 h ago`, and from a week on the date."""
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
    """Time that runs: `3.2 s`, `1:07`."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)}:{int(seconds % 60):02}"


def count(number: int, noun: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def without_end(text: str, width: int) -> str:
    """`text` in at most `width` characters, cut at its end."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def without_start(text: str, width: int) -> str:
    """`text` in at most `width` characters, cut at its start: of a path the end says more."""
    return text if len(text) <= width else f"…{text[len(text) - max(0, width - 1) :]}"


def without_middle(text: str, width: int) -> str:
    """`text` in at most `width` characters, its start and its last few kept: `Convolution (NHW… IGEMM #2`."""
    if len(text) <= width:
        return text
    tail = min(9, max(0, width - 1) // 2)
    return f"{text[: max(0, width - 1 - tail)]}…{text[len(text) - tail :]}"
