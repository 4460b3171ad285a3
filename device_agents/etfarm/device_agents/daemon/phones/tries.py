"""Failed tries to serve a phone: the pause before the next one, and the error messages already logged."""

from __future__ import annotations

from collections import deque
from typing import Final

from etfarm.wire.retry_backoff import retry_backoff

_REMEMBERED: Final = 20
"""Number of remembered messages; a phone that cannot be served alternates between a few of them."""


class FailedTries:
    """The failed tries to serve one phone since it was last served or plugged in.

    Args:
        first_s: limit in seconds of the first pause, which doubles with each try up to `last_s`.
        last_s: limit in seconds of all pauses.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._pauses = retry_backoff(first_s, last_s)
        self._logged = deque[str](maxlen=_REMEMBERED)
        self.count = 0
        """Number of failed tries."""

    def add(self) -> float:
        """Count a failed try and return the seconds until the next one."""
        self.count += 1
        return next(self._pauses)

    def is_new(self, message: str) -> bool:
        """Return whether this is the first call with this message."""
        if message in self._logged:
            return False
        self._logged.append(message)
        return True
