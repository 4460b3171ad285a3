"""How two language models generate text, in a comparison: their rates, the part of each method, and their accuracy."""

from __future__ import annotations

from dataclasses import dataclass

from etfarm.client.reports.change import NumberChange, Outcome
from etfarm.client.reports.enums import VerdictStatus
from etfarm.client.reports.json_object import JsonObject


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RateChange(JsonObject):
    """One number of generated text on both sides."""

    base: float | None = None
    candidate: float | None = None
    ratio: float | None = None
    """The candidate's over the base's: above 1 is better for tokens per second, and worse for a time."""
    ratio_ci95: tuple[float, float] | None = None
    """The lower and the upper bound of its 95 % confidence interval."""
    outcome: Outcome | None = None
    spread_observed: bool = False
    """Whether three processes or more on each side showed how much they vary."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationPartComparison(JsonObject):
    """A method's part in a point, if several methods generate text together."""

    method: str = ""
    prefill_ns: NumberChange | None = None
    """Time of its executions for a prompt, in nanoseconds; None if no side has any."""
    decode_ns: NumberChange | None = None
    """Their time for a token after the first, in nanoseconds; None if no side has any."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationPointComparison(JsonObject):
    """Generated text after one prompt length at one depth of the context."""

    prompt_tokens: int = 0
    depth: int = 0
    base_verdict: VerdictStatus | None = None
    candidate_verdict: VerdictStatus | None = None
    ttft: RateChange | None = None
    """Time to the first token, in nanoseconds."""
    prefill: RateChange | None = None
    """Tokens per second."""
    decode: RateChange | None = None
    """Tokens per second."""
    parts: tuple[GenerationPartComparison, ...] = ()
    """What each method takes, if several generate text together."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LogitErrors(JsonObject):
    """How exactly one side computes its logits after given tokens."""

    reference: str | None = None
    """What it is compared with, as `GenerationReference.reference`."""
    tokens: int | None = None
    """Number of tokens that both executed."""
    sqnr_db: float | None = None
    """The signal-to-noise ratio in dB, capped at 300 for an exact match."""
    top1_agreement: float | None = None
    """Part of the tokens after which both find the same token most likely, 0 to 1."""
    kl_divergence: float | None = None
    """Mean Kullback-Leibler divergence of the next-token distribution from the reference's, in nats."""
    max_abs_error: float | None = None
    perplexity: float | None = None
    """The device's perplexity of the text; None for drawn tokens."""
    perplexity_ratio: float | None = None
    """That divided by the reference's."""
    generated_tokens: int | None = None
    """Number of generated tokens that were compared with those that the reference would generate."""
    first_difference: int | None = None
    """Index of the first of them that differs; None if none does."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LogitsComparison(JsonObject):
    """The logits of both sides after equal tokens, against one reference."""

    base: LogitErrors | None = None
    candidate: LogitErrors | None = None
    sqnr_change_db: float | None = None
    """Change of the SQNR in dB; None without a common reference and equally many tokens."""
    top1_change: float | None = None
    """Change of the top-1 agreement, -1 to 1."""
    top1_tolerance: float | None = None
    """The largest drop of the top-1 agreement that counts as none: 0.02, or two standard errors of the difference if that is
    more."""
    top1_dropped: bool | None = None
    """Whether it dropped by more than that."""
    perplexity: NumberChange | None = None
    """The perplexity of the text; None unless both sides scored equally many tokens of one."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerationComparison(JsonObject):
    """The text that both sides generated."""

    points: tuple[GenerationPointComparison, ...] = ()
    """The prompt lengths and depths that both sides have."""
    same_program: bool = False
    """Whether both sides ran the same program."""
    accuracy: LogitsComparison | None = None
    """The logits of both sides; None if no side has their accuracy."""
