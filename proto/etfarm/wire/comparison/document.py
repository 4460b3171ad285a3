"""The whole document of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from etfarm.wire import changes
from etfarm.wire.comparison import generation, latency, operators, program
from etfarm.wire.comparison.gate import Gate, judge
from etfarm.wire.comparison.pairing import differs, pair
from etfarm.wire.comparison.remedy import SIDES, how_to_decide, how_to_decide_rates
from etfarm.wire.comparison.sides import NothingToCompare, Side, is_live, name
from etfarm.wire.errors import EtfarmError
from etfarm.wire.report import Json, error_json

SCHEMA: Final = "etfarm.comparison/1"


def compare(base: Side, candidate: Side, gate: Gate | None = None) -> Json:
    """Return the document etfarm.comparison/1 of two sides.

    Raises:
        REPORT_NOT_FOUND: a side's choice matches none of its reports.
        NothingToCompare: no report of a side has a counterpart on the other.
    """
    of_base, of_candidate = base.chosen, candidate.chosen
    for side, reports in ((base, of_base), (candidate, of_candidate)):
        if not reports:
            why = f": it is {side.job['state']}" if side.job else ""
            raise NothingToCompare(
                f"There are no reports in {side.name}{why}.",
                "Choose a job that measured something: `etfarm jobs list`.",
                side=side.name,
            )
    pairing = pair(of_base, of_candidate)
    if not pairing.pairs:
        raise NothingToCompare(
            f"No report of {base.name} has a counterpart in {candidate.name}: the base has {base.listed}, the "
            f"candidate {candidate.listed}.",
            "Choose one of each: BASE#NUMBER CANDIDATE#NUMBER.",
            base=base.name,
            candidate=candidate.name,
        )
    pairs = [_pair(*both) for both in pairing.pairs]
    document: Json = {
        "schema": SCHEMA,
        "base": base.about(),
        "candidate": candidate.about(),
        "pairs": pairs,
        "unpaired": [
            {"side": side, "report": name(report)}
            for side, reports in (("BASE", pairing.base_only), ("CANDIDATE", pairing.candidate_only))
            for report in reports
        ],
        "notes": list(_notes(pairing.pairs, pairs, base, candidate)),
        "gate": None,
        "error": None,
    }
    if gate is not None:
        document["gate"] = judge(document, gate)
    return document


def failed(error: EtfarmError | None) -> Json:
    """Return a document, with every key, for sides that could not be compared."""
    nothing: Json = {"job": None, "file": None, "choice": None, "reports": 0}
    return {
        "schema": SCHEMA,
        "base": nothing,
        "candidate": dict(nothing),
        "pairs": [],
        "unpaired": [],
        "notes": [],
        "gate": None,
        "error": None if error is None else error_json(error),
    }


def _pair(base: Json, candidate: Json) -> Json:
    return {
        "base": name(base),
        "candidate": name(candidate),
        "differs": differs(base, candidate),
        "latency": latency.latency(base, candidate),
        "operators": operators.operators(base, candidate),
        "size": program.size(base, candidate),
        "memory": program.memory(base, candidate),
        "accuracy": program.accuracy(base, candidate),
        "delegation": program.delegation(base, candidate),
        "changes": [dict(change) for change in changes.changes(base, candidate)],
        "generation": generation.generation(base, candidate),
    }


def _find_unobserved(reports: tuple[Json, Json], pair: Json) -> tuple[str, ...]:
    """Return the sides of a pair that were measured separately, and whose runs vary by an unknown amount."""
    if (ratio := latency.compared(*reports)) is not None:
        return ratio.unobserved
    points = pair["generation"]["points"] if pair["generation"] else []
    rates = [point["decode"] or point["ttft"] for point in points]
    return SIDES if any(rate and not rate["spread_observed"] for rate in rates) else ()


def _has_other_lengths(pair: Json, reports: tuple[Json, Json]) -> bool:
    return pair["generation"] is not None and not generation.has_equal_lengths(*reports)


def _dropped(pair: Json) -> Json | None:
    """Return the LOGITS of a PAIR whose top-1 agreement dropped; None if it did not."""
    accuracy: Json | None = (pair["generation"] or {}).get("accuracy")
    return accuracy if accuracy and accuracy["top1_dropped"] else None


def _remedy(pair: Json, unobserved: Sequence[str]) -> str:
    """Return how to decide which side of a pair is faster."""
    if pair["latency"] is None:
        return how_to_decide_rates(pair)
    other = not pair["latency"]["same_program"] and changes.is_other_program(pair["changes"])
    return how_to_decide(pair, unobserved, other_program=other)


def _notes(reports: Sequence[tuple[Json, Json]], pairs: Sequence[Json], base: Side, candidate: Side) -> Iterator[str]:
    """Yield notes that are needed to interpret the rest correctly.

    Args:
        reports: those of each pair.
        pairs: each PAIR.
        base: the base.
        candidate: the candidate.
    """
    for side in (base, candidate):
        if is_live(side.job):
            yield f"{side.name[0].upper()}{side.name[1:]} is not done: cells that are still live are left out."
    if all(old["cell"] is not None and old["cell"] == new["cell"] for old, new in reports):
        note = "Both sides are the same."
        yield (
            f"{note} To compare two reports of one job give JOB#0 JOB#1: it has {base.listed}." if len(base.reports) > 1 else note
        )
        return
    lengths = next((both for pair, both in zip(pairs, reports, strict=True) if _has_other_lengths(pair, both)), None)
    if lengths is not None:
        old, new = (report["generation"]["generated_tokens"] for report in lengths)
        lacks = f"Decode is not compared: the base generated {old:,} tokens, the candidate {new:,}"
        yield f"{lacks}. Measure both with the same number."
    dropped = next((accuracy for pair in pairs if (accuracy := _dropped(pair)) is not None), None)
    if dropped is not None:
        old, new = (dropped[side]["top1_agreement"] for side in SIDES)
        tokens, tolerance = dropped["base"]["tokens"], dropped["top1_tolerance"]
        agrees = f"The candidate's most likely token is the reference's after {new * 100:.1f} % of {tokens:,} tokens"
        yield f"{agrees}, the base's after {old * 100:.1f} %: less by more than the tolerance of {tolerance * 100:.1f} points."
    compared = [(pair, _find_unobserved(both, pair)) for pair, both in zip(pairs, reports, strict=True)]
    unclear = [(pair, unobserved) for pair, unobserved in compared if unobserved]
    if unclear:
        pair, unobserved = unclear[0]
        which = "both sides" if len(unobserved) > 1 else f"the {unobserved[0]}"
        known = f"it is not known how much runs of {which} vary: the interval may be too narrow"
        yield f"Measured in separate runs, and {known}. {_remedy(pair, unobserved)}."
