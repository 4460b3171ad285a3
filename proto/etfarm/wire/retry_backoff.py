"""Pauses between tries: exponential back-off with jitter, for clients, agents and phones alike."""

from __future__ import annotations

import random
from collections.abc import Iterator


def retry_backoff(first_s: float, last_s: float) -> Iterator[float]:
    """Yield the seconds to wait before each further try, without end.

    Half of each pause is random, so that those that lost one server do not come back all at once.

    Args:
        first_s: the longest first pause, which doubles with each try ...
        last_s: ... up to this.
    """
    longest_s = first_s
    while True:
        yield longest_s * random.uniform(0.5, 1.0)
        longest_s = min(2 * longest_s, last_s)
