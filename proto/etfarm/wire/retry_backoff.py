"""Pauses between retries: exponential back-off with jitter."""

from __future__ import annotations

import random
from collections.abc import Iterator


def retry_backoff(first_s: float, last_s: float) -> Iterator[float]:
    """Yield the pause before each retry in seconds, endlessly.

    Half of each pause is random, so that clients that lost a server do not reconnect all at once.

    Args:
        first_s: upper bound of the first pause; the bound doubles with each retry.
        last_s: maximum of the bound.
    """
    longest_s = first_s
    while True:
        yield longest_s * random.uniform(0.5, 1.0)
        longest_s = min(2 * longest_s, last_s)
