"""Pauses between tries."""

from __future__ import annotations

from itertools import islice

from etfarm.wire.retry_backoff import retry_backoff


def test_pauses_double_up_to_the_last_and_half_of_each_is_random() -> None:
    longest = [0.2, 0.4, 0.8, 1.6, *[2.0] * 200]
    pauses = list(islice(retry_backoff(0.2, 2.0), len(longest)))
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert min(pauses[4:]) < 1.2 and max(pauses[4:]) > 1.8
