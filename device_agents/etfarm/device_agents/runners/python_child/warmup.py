"""The end of a warm-up, by the rule of `measure steady=1` in native/PROTOCOL.md."""

from __future__ import annotations

from collections import deque
from typing import Final

_WINDOWS: Final = 3
_ITERATIONS: Final = 5
_NS: Final = 50_000_000
_SAMPLES: Final = 1 << 16
_SHARE: Final = 50
"""Divisor of the tolerated difference: one part in 50 is 2 %."""
_RESOLUTION_NS: Final = 104
"""Two ticks of a 19.2 MHz counter, as in phones, in nanoseconds."""


class Window:
    """The windows of a warm-up."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._start_ns: int | None = None
        self._medians: deque[int] = deque(maxlen=_WINDOWS)

    def add(self, sample_ns: int, elapsed_ns: int) -> bool:
        """Add an iteration and return whether the median is steady; `elapsed_ns` is its end, from the start of the warm-up."""
        if self._start_ns is None:
            self._start_ns = elapsed_ns - sample_ns
        self._samples.append(sample_ns)
        count = len(self._samples)
        if count < _ITERATIONS or (elapsed_ns - self._start_ns < _NS and count < _SAMPLES):
            return False
        self._medians.append(sorted(self._samples)[count // 2])
        self._samples.clear()
        self._start_ns = elapsed_ns
        low, high = min(self._medians), max(self._medians)
        return len(self._medians) == _WINDOWS and high - low <= max(low // _SHARE, _RESOLUTION_NS)
