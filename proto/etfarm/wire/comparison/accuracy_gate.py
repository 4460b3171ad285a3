"""Gates on accuracy: the SQNR of outputs and logits, the agreement of their largest values, and the perplexity of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from etfarm.wire.comparison.finding import Finding, percent
from etfarm.wire.comparison.program import has_other_samples
from etfarm.wire.comparison.remedy import SIDES
from etfarm.wire.report import Json
from etfarm.wire.sqnr import decibels

EXACT_DB: Final = 100.0
"""SQNR above which outputs count as equally exact: fp32 kernels differ only by rounding, at 120 to 150 dB."""


def judge_sqnr(pair: Json, limit: float) -> Iterator[Finding]:
    """Judge the SQNR of each output of a PAIR, and of a language model's logits; a limit in dB."""
    if (logits := _logits(pair)) is None:
        yield from _outputs_sqnr(pair, limit)
        return
    if (reason := _incomparable(logits, "sqnr_db")) is not None:
        yield reason
        return
    before, after = (float(logits[side]["sqnr_db"]) for side in SIDES)
    if (finding := _lost_sqnr("the logits", before, after, limit)) is not None:
        yield finding


def judge_top1(pair: Json, limit: float) -> Iterator[Finding]:
    """Judge how often the largest value of outputs or logits is the reference's; a limit in percentage points."""
    rows = [("the logits", logits)] if (logits := _logits(pair)) is not None else [*_outputs_top1(pair)]
    if not rows:
        yield Finding("NOT_MEASURED", "top-1 agreement is not known for both sides")
    for name, row in rows:
        if (reason := _incomparable(row, "top1_agreement")) is not None:
            yield reason
            return
        before, after = (float(row[side]["top1_agreement"]) for side in SIDES)
        if (1 - after) * 100 > limit + _ROUNDING and (reason := _other_samples(row, "top-1 agreement")) is not None:
            yield reason
            return
        if (before - after) * 100 > limit + _ROUNDING:
            message = f"the top-1 agreement of {name} fell by {(before - after) * 100:.1f} points"
            yield Finding("LESS_ACCURATE", f"{message}, {before * 100:.1f} -> {after * 100:.1f} %; {limit:g} is allowed")


def judge_perplexity(pair: Json, limit: float) -> Iterator[Finding]:
    """Judge the perplexity of a text; a limit in percent of the base's."""
    number = (pair["generation"] or {}).get("accuracy") and pair["generation"]["accuracy"]["perplexity"]
    if not number or number["ratio"] is None:
        yield Finding("NOT_MEASURED", "perplexity is not known for both sides over one text: measure it with --tokens FILE")
    elif number["ratio"] > 1 + limit / 100:
        values = f"{number['base']:,.4g} -> {number['candidate']:,.4g}"
        yield Finding("LESS_ACCURATE", f"perplexity is {percent(number['ratio'] - 1)} higher, {values}; {limit:g} % is allowed")


_ROUNDING: Final = 1e-9
"""Error of a difference of two percentages."""


def _logits(pair: Json) -> Json | None:
    """Return the LOGITS of a PAIR; None unless a side has them."""
    known: Json | None = (pair["generation"] or {}).get("accuracy")
    return known


def _outputs_top1(pair: Json) -> Iterator[tuple[str, Json]]:
    """Yield the outputs whose base has a top-1 agreement, each with a name for sentences."""
    for output in pair["accuracy"]:
        if output["base"] and output["base"]["top1_agreement"] is not None:
            yield f"output {output['output']}" if output["output"] else "the output", output


def _incomparable(row: Json, key: str) -> Finding | None:
    """Return why a number of both sides cannot be compared; None if it can."""
    base, candidate = row["base"], row["candidate"]
    names = {"sqnr_db": "accuracy", "top1_agreement": "top-1 agreement"}
    if not base or not candidate or base[key] is None or candidate[key] is None:
        return Finding("NOT_MEASURED", f"{names[key]} is not known for both sides")
    if (other := _other_reference(row, names[key])) is not None:
        return other
    if base.get("tokens") != candidate.get("tokens"):
        message = f"{names[key]} is not known for both sides after the same tokens"
        return Finding("NOT_MEASURED", f"{message}: the base scored {base['tokens']:,}, the candidate {candidate['tokens']:,}")
    return None


def _other_reference(row: Json, what: str) -> Finding | None:
    """Return that the sides are compared with two references; None if they are not."""
    references = [row[side]["reference"] for side in SIDES if row[side]]
    if len(set(references)) < 2:
        return None
    which = f"the base is compared with the {references[0]}, the candidate with the {references[1]}"
    return Finding("NOT_MEASURED", f"{what} is not known for both sides against one reference: {which}")


def _other_samples(row: Json, what: str) -> Finding | None:
    """Return that the sides were measured on different samples; None if they were not."""
    if not has_other_samples(row["base"], row["candidate"]):
        return None
    base, candidate = (row[side].get("samples") or 1 for side in SIDES)
    which = f"the base has {base}, the candidate {candidate}" if base != candidate else f"each has {base}, but not the same"
    remedy = "Measure both with one --inputs FOLDER, or with the same calibration inputs"
    if base != candidate:
        remedy += ", few enough that no limit leaves some out (SAMPLES_LEFT_OUT)"
    message = f"{what} is not known for both sides over the same samples: {which}"
    return Finding("NOT_MEASURED", f"{message}. {remedy}")


def _lost_sqnr(name: str, before: float, after: float, limit: float) -> Finding | None:
    """Return that an SQNR fell by more than the limit; None if it did not."""
    if (lost := min(before, EXACT_DB) - after) <= limit:
        return None
    counted = f" (counts as {EXACT_DB:g})" if before > EXACT_DB else ""
    message = f"{name} lost {decibels(lost)} of SQNR, {before:.1f}{counted} -> {decibels(after)}"
    return Finding("LESS_ACCURATE", f"{message}; {limit:g} dB is allowed")


def _outputs_sqnr(pair: Json, limit: float) -> Iterator[Finding]:
    measured = [output for output in pair["accuracy"] if _sqnr_db(output["base"]) is not None]
    if not measured:
        yield Finding("NOT_MEASURED", "accuracy is not known for both sides")
    for output in measured:
        after = _sqnr_db(output["candidate"])
        # More than EXACT_DB counts as EXACT_DB, so that no base is better than this candidate by more than the limit.
        is_exact = after is not None and EXACT_DB - after <= limit
        reason = _other_reference(output, "accuracy") or (None if is_exact else _other_samples(output, "accuracy"))
        if reason is not None:
            yield reason
            return
    for output in measured:
        name = f"output {output['output']}" if output["output"] else "the output"
        before, after = _sqnr_db(output["base"]) or 0.0, _sqnr_db(output["candidate"])
        if after is None:
            was_equal = output["base"]["equal"] and output["base"]["sqnr_db"] is None
            change = (
                "was equal to its reference and is not now"
                if was_equal
                else f"had an SQNR of {decibels(before)} and has none now"
            )
            yield Finding("LESS_ACCURATE", f"{name} {change}")
        elif (finding := _lost_sqnr(name, before, after, limit)) is not None:
            yield finding


def _sqnr_db(errors: Json | None) -> float | None:
    """Return an output's SQNR; EXACT_DB for equal outputs without an SQNR, as for an all-zero reference."""
    if errors is None:
        return None
    known: float | None = errors["sqnr_db"]
    return EXACT_DB if known is None and errors["equal"] else known
