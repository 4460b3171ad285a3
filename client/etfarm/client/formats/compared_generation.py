"""How two language models generate text, as text: the rates, the part of each method, and the accuracy of the logits.

These are pure functions of etfarm.comparison/1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from etfarm.client.formats import generation, units
from etfarm.client.formats.compared_fact import Fact, number_fact
from etfarm.wire.comparison import EXACT_DB
from etfarm.wire.comparison.numbers import ratio_text

Json = Mapping[str, Any]

_LOGITS: Final = (
    "reference", "sqnr_db", "top1_agreement", "kl_divergence", "generated_tokens", "first_difference", "perplexity",
)  # fmt: skip
"""The numbers of a side that are shown."""


def rates(pair: Json, key: str) -> Iterator[tuple[Json, Json]]:
    """Yield the points of generated text that both sides have, each with the change of a number that has a ratio."""
    for point in (pair["generation"] or {}).get("points", ()):
        if point[key] and point[key]["ratio"] is not None:
            yield point, point[key]


def rate_answer(point: Json, change: Json, pair: Json) -> str:
    """Return `1.052x [1.041, 1.063]  faster (prompt 128)` for a rate, of which more is better."""
    outcome = (change["outcome"] or "").replace("_", " ")
    same = "same program, " if pair["generation"]["same_program"] else ""
    ratio = ratio_text(change["ratio"], change["ratio_ci95"])
    return f"{ratio} of the tokens per second  {same}{outcome} ({generation.where(point)})"


def rate_facts(pair: Json) -> Iterator[Fact]:
    """Yield the numbers of generated text at each prompt length and depth that both sides have."""
    for key, name in (("ttft", "first token"), ("prefill", "prefill"), ("decode", "decode")):
        for point, change in rates(pair, key):
            shown = units.time if key == "ttft" else _tokens_per_s
            yield Fact(
                f"{name}, {generation.where(point)}", shown(change["base"]), shown(change["candidate"]),
                f"{(change['ratio'] - 1) * 100:+.1f} %",
            )  # fmt: skip


def part_facts(pair: Json) -> Iterator[Fact]:
    """Yield what each method of a language model takes at each prompt length and depth, for a prompt and for a token."""
    for point in (pair["generation"] or {}).get("points", ()):
        for part in point["parts"]:
            for key, what in (("prefill_ns", "first token"), ("decode_ns", "token")):
                yield from number_fact(f"  {part['method']}, {what}, {generation.where(point)}", part[key], units.time)


def logit_facts(pair: Json) -> Iterator[Fact]:
    """Yield the accuracy of a language model: its logits, the agreement of their largest ones, and the perplexity of the text."""
    logits = (pair["generation"] or {}).get("accuracy")
    if not logits:
        return
    base, candidate = (logits[side] or dict.fromkeys(_LOGITS) for side in ("base", "candidate"))
    yield Fact("SQNR of logits", _decibels(base), _decibels(candidate), _sqnr_change(logits, base, candidate))
    points = (logits["top1_change"] or 0.0) * 100
    dropped = f"{points:+.1f} points{' (lower)' if logits['top1_dropped'] else ''}" if abs(points) >= 0.05 else ""
    yield Fact("top-1 agreement", _share(base["top1_agreement"]), _share(candidate["top1_agreement"]), dropped)
    divergences = base["kl_divergence"], candidate["kl_divergence"]
    if divergences != (None, None):
        yield Fact("KL divergence", _shown(divergences[0], ".2g", " nats"), _shown(divergences[1], ".2g", " nats"), "")
    if base["generated_tokens"] or candidate["generated_tokens"]:
        yield Fact("first other token", _parting(base), _parting(candidate), "")
    if logits["perplexity"] is not None:
        yield from number_fact("perplexity", logits["perplexity"], lambda value: _shown(value, ",.4g"))
    elif base["perplexity"] is not None or candidate["perplexity"] is not None:
        yield Fact("perplexity", _shown(base["perplexity"], ",.4g"), _shown(candidate["perplexity"], ",.4g"), "another text")


def _decibels(side: Json) -> str:
    return "-" if side["sqnr_db"] is None else generation.logits(side)


def _sqnr_change(logits: Json, base: Json, candidate: Json) -> str:
    """Return `-2.1 dB`; empty if the change is unknown or only rounding."""
    if base["reference"] and candidate["reference"] and base["reference"] != candidate["reference"]:
        return "another reference"
    change_db = logits["sqnr_change_db"]
    if change_db is None or min(base["sqnr_db"] or 0.0, candidate["sqnr_db"] or 0.0) >= EXACT_DB or abs(change_db) < 0.05:
        return ""
    return f"{change_db:+.1f} dB"


def _share(share: float | None) -> str:
    return "-" if share is None else units.percent(share)


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _parting(side: Json) -> str:
    """Return where generated text parts from the reference's: `57 of 128`, or `none of 128`."""
    if not side["generated_tokens"]:
        return "-"
    first = side["first_difference"]
    return f"{'none' if first is None else f'{first:,}'} of {side['generated_tokens']:,}"


def _tokens_per_s(value: float | None) -> str:
    return units.rate(value)[0]
