"""The numbers that a benchmark may ask for: what the command line, the page's form and the server accept."""

from __future__ import annotations

from typing import Final, NamedTuple


class Range(NamedTuple):
    """The least and the most that a number may be."""

    min: int
    max: int


RANGES: Final = {
    "warmup": Range(0, 10_000_000),
    "iterations": Range(1, 1_000_000),
    "repeat": Range(1, 50),
    "trace_iterations": Range(1, 1_000),
    "priority": Range(-100, 100),
}
"""Those of `Measurement` and `JobSpec`, by field. Agents keep 1,000,000 samples of all runs if a job sets no `max_samples`, and
a result holds 1,000 traced iterations."""
