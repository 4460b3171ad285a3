"""The result of a gate, part of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.json_object import JsonObject, OpenEnum


class GateOutcome(OpenEnum):
    """The result of a gate."""

    PASSED = "passed"
    FAILED = "failed"
    """Something is worse than allowed, or missing."""
    INCONCLUSIVE = "inconclusive"
    """Nothing is shown to be worse, but the latencies do not decide: measuring again, or better, may."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GateLimit(JsonObject):
    """The maximum deterioration of a metric."""

    metric: str = ""
    """latency, size, memory, accuracy or top1; of language models also ttft, prefill, decode or perplexity."""
    limit: float = 0.0
    """The limit, in `unit`."""
    unit: str = ""
    """% or dB."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Finding(JsonObject):
    """Why a gate did not pass, or a note."""

    pair: int | None = None
    """Index in `Comparison.pairs`; None for the whole comparison."""
    metric: str | None = None
    code: str = ""
    """Word that programs may rely on."""
    message: str = ""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GateResult(JsonObject):
    """The result of a gate."""

    limits: tuple[GateLimit, ...] = ()
    strict: bool = False
    accept_invalid: bool = False
    passed: bool = False
    outcome: GateOutcome | None = None
    reasons: tuple[Finding, ...] = ()
    """Why it did not pass."""
    notes: tuple[Finding, ...] = ()
