"""When a warm-up is over: the rule of `measure steady=1`, as native/PROTOCOL.md states it."""

from __future__ import annotations

from collections import deque
from typing import Final

_WINDOWS: Final = 3
_ITERATIONS: Final = 5
_NS: Final = 50_000_000
_SAMPLES: Final = 1 << 16
_SHARE: Final = 50
"""One part of so many: 2 %."""
_RESOLUTION_NS: Final = 104
"""Two ticks of a counter at 19.2 MHz, which phones have."""


class Window:
    """The windows of a warm-up."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        self._begun_ns: int | None = None
        self._medians: deque[int] = deque(maxlen=_WINDOWS)

    def add(self, sample_ns: int, elapsed_ns: int) -> bool:
        """Whether the median is steady after this iteration, which ended `elapsed_ns` after the warm-up's begin."""
        if self._begun_ns is None:
            self._begun_ns = elapsed_ns - sample_ns
        self._samples.append(sample_ns)
        count = len(self._samples)
        if count < _ITERATIONS or (elapsed_ns - self._begun_ns < _NS and count < _SAMPLES):
            return False
        self._medians.append(sorted(self._samples)[count // 2])
        self._samples.clear()
        self._begun_ns = elapsed_ns
        low, high = min(self._medians), max(self._medians)
        return len(self._medians) == _WINDOWS and high - low <= max(low // _SHARE, _RESOLUTION_NS)
