"""How much a fault of a device counts, by the reason of its error."""

from __future__ import annotations

from typing import Final

from etfarm.wire.errors import EtfarmError, Fault

DEFAULT_WEIGHT: Final = 1.0
"""Weight of a device fault whose reason has none of its own."""

LOST_WEIGHT: Final = 0.3
"""Weight of an attempt whose agent or link was lost: that happens to a board with a good processor, too."""

WEIGHTS: Final = {
    # The runner fails without any program.
    "DEVICE_SELF_TEST_FAILED": 1.5,
    "ATTEMPT_LOST": LOST_WEIGHT,
    "DEVICE_GONE": LOST_WEIGHT,
    "SESSION_LOST": LOST_WEIGHT,
    "TRANSFER_TIMED_OUT": LOST_WEIGHT,
    # The server and the agent disagreed for a moment on what runs; nothing failed.
    "DEVICE_BUSY": 0.0,
    "DEVICE_OFFLINE": 0.0,
    "DEVICE_UNKNOWN": 0.0,
}

FREE_CAUSES: Final = frozenset({"stopped", "server-restart"})
"""Causes of a lost attempt, as its metadata `cause` has them, that say nothing about the device: its agent was stopped on
purpose, or the server itself was away and cannot know when the agent left."""


def weight_of(error: EtfarmError) -> float:
    """Return how much an error counts against the device; 0 for a fault of the user or of the farm."""
    if error.fault is not Fault.DEVICE or error.metadata.get("cause") in FREE_CAUSES:
        return 0.0
    return WEIGHTS.get(error.reason, DEFAULT_WEIGHT)
