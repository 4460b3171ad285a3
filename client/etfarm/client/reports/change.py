"""How a number of the candidate differs from the base's, in a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.json_object import JsonObject, OpenEnum


class Outcome(OpenEnum):
    """How the candidate's latency differs from the base's."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"
    """The interval of the ratio contains 1."""
    TOO_FEW = "too_few"
    """There are too few samples or rounds for an interval."""
    INCONCLUSIVE = "inconclusive"
    """The two were measured in separate runs, and too little is known about how such runs vary to tell."""


class OperatorOutcome(OpenEnum):
    """How the candidate's time in corresponding operators differs from the base's."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"
    """The interval of the change contains 0."""
    TOO_FEW = "too_few"
    """There are too few iterations for an interval."""
    INCONCLUSIVE = "inconclusive"
    """The interval does not contain 0, but a traced pass is not VALID, or how separate runs vary was not observed."""


class Method(OpenEnum):
    """How a ratio of latencies was measured."""

    PAIRED = "paired"
    """Both took turns in one attempt, and rounds are compared."""
    SEPARATE = "separate"
    """Each was measured alone. The interval covers the variation within and between runs as far as the spread of both sides is
    known."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class NumberChange(JsonObject):
    """One number of both sides."""

    base: float | None = None
    candidate: float | None = None
    change: float | None = None
    """candidate - base."""
    ratio: float | None = None
    """candidate / base; None unless both are above 0."""
