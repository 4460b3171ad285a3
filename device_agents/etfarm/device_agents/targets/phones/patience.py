"""A phone that could not be served: how long it is left alone before the next try, and what people were told of it already."""

from __future__ import annotations

import random
from collections import deque
from typing import Final

_REMEMBERED: Final = 20
"""Sentences. What keeps a phone from being served tells a few of them in turns."""


class Patience:
    """Of one phone, since it was served last or plugged in.

    Args:
        first_s: the first pause, at most ...
        last_s: ... which doubles up to this.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._pause_s = first_s
        self._last_s = last_s
        self._told = deque[str](maxlen=_REMEMBERED)
        self.tries = 0
        """That failed."""

    def pause_s(self) -> float:
        """A try failed: how long until the next one. Jittered, so that phones of one hub are not tried all at once."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, self._last_s)
        self.tries += 1
        return pause_s

    def is_new(self, sentence: str) -> bool:
        """Whether it was not told yet; from here on it was."""
        if sentence in self._told:
            return False
        self._told.append(sentence)
        return True
