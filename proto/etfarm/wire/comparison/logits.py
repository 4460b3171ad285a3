"""The change of a language model's accuracy: its logits after given tokens, and the perplexity of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from etfarm.v1 import comparison_pb2
from etfarm.wire.comparison.numbers import measure
from etfarm.wire.messages import fill
from etfarm.wire.report import Json

TOP1_TOLERANCE: Final = 0.02
"""Drop of the top-1 agreement that counts as none, however many tokens were scored."""
_STANDARD_ERRORS: Final = 2.0
"""Number of standard errors of the difference of two agreements within which a drop counts as none."""

_NOTHING: Final[Json] = {"references": (), "is_text": False, "tokens": 0, "perplexity": None, "perplexity_tokens": 0}


def logits(base: Json, candidate: Json) -> comparison_pb2.GenerationAccuracyChange | None:
    """Return the change of the logits of two REPORTs; None unless a side has the accuracy of generation.

    Both sides are compared with the first common reference. A change is known if both were, after equally many tokens of the same
    kind: the farm draws the same tokens for each program.
    """
    sides = [_accuracy(report) for report in (base, candidate)]
    if not any(sides):
        return None
    both = [side or _NOTHING for side in sides]
    references = _references(both)
    old, new = (_errors(side, reference) if reference else None for side, reference in zip(both, references, strict=True))
    change = comparison_pb2.GenerationAccuracyChange(base=old, candidate=new, perplexity=_perplexity(*both))
    if old and new and both[0]["is_text"] == both[1]["is_text"] and (old.reference, old.tokens) == (new.reference, new.tokens):
        _add_changes(change)
    return change


def top1_tolerance(base: float, candidate: float, tokens: int) -> float:
    """Return the largest drop of the top-1 agreement that counts as none, from two fractions of equally many tokens.

    It is TOP1_TOLERANCE, or two standard errors of the difference if that is more: 64 tokens cannot tell 98 % from 94 %. The
    error is that of independent tokens, which is more than that of equal ones.
    """
    variance = sum(share * (1 - share) for share in (base, candidate)) / max(1, tokens)
    return max(TOP1_TOLERANCE, _STANDARD_ERRORS * math.sqrt(max(0.0, variance)))


def _add_changes(change: comparison_pb2.GenerationAccuracyChange) -> None:
    """Set the changes of both sides' errors, which are against one reference, after equally many tokens."""
    old, new = change.base, change.candidate
    if old.HasField("sqnr_db") and new.HasField("sqnr_db"):
        change.sqnr_change_db = new.sqnr_db - old.sqnr_db
    if old.HasField("top1_agreement") and new.HasField("top1_agreement"):
        change.top1_change = new.top1_agreement - old.top1_agreement
        change.top1_tolerance = top1_tolerance(old.top1_agreement, new.top1_agreement, old.tokens)
        change.top1_dropped = -change.top1_change > change.top1_tolerance


def _accuracy(report: Json) -> Json | None:
    """Return the accuracy of a report's generation; None if it was not measured."""
    known: Json | None = report["generation"] and report["generation"]["accuracy"]
    return known if known and not known["error"] else None


def _references(sides: Sequence[Json]) -> tuple[Json | None, Json | None]:
    """Return the reference of each side: the first common one, else each side's first."""
    known = [{each["reference"]: each for each in side["references"]} for side in sides]
    common = next((name for name in known[0] if name in known[1]), None)
    if common is not None:
        return known[0][common], known[1][common]
    first, second = (next(iter(side.values()), None) for side in known)
    return first, second


def _errors(side: Json, reference: Json) -> comparison_pb2.LogitErrors:
    """Return the errors of a side against a reference."""
    first = (reference["first_difference"] or {}).get("index")
    return fill(comparison_pb2.LogitErrors(), {**reference, "perplexity": side["perplexity"], "first_difference": first})


def _perplexity(base: Json, candidate: Json) -> comparison_pb2.MeasureChange | None:
    """Return how the perplexity changed; None unless both sides scored equally many tokens of a text."""
    if not (base["is_text"] and candidate["is_text"]) or base["perplexity_tokens"] != candidate["perplexity_tokens"]:
        return None
    return measure(base["perplexity"], candidate["perplexity"])
