"""The whole comparison of two sides, and its document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from etfarm.v1 import comparison_pb2
from etfarm.wire import changes
from etfarm.wire.comparison import generation, latency, operators, program
from etfarm.wire.comparison.gate import Gate, judge, unobserved_sides
from etfarm.wire.comparison.remedy import how_to_decide, how_to_decide_rates
from etfarm.wire.comparison.sides import NothingToCompare, Side, is_live, name
from etfarm.wire.errors import EtfarmError
from etfarm.wire.messages import to_scalar
from etfarm.wire.report import Json, error_json
from etfarm.wire.report_keys import project

SCHEMA: Final = "etfarm.comparison/1"


def compare(base: Side, candidate: Side) -> comparison_pb2.Comparison:
    """Return the comparison of two sides, without a gate.

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
    return comparison_pb2.Comparison(
        base=base.about(),
        candidate=candidate.about(),
        pairs=pairs,
        unpaired=_unpaired(pairing),
        notes=_notes(pairing.pairs, pairs, base, candidate),
    )


def document(comparison: comparison_pb2.Comparison, gate: Gate | None = None) -> Json:
    """Return the document etfarm.comparison/1 of a comparison, with what a gate says of it."""
    written: Json = {"schema": SCHEMA, **project(comparison)}
    if gate is not None:
        written["gate"] = project(judge(written, gate))
    return written


def failed(error: EtfarmError | None) -> Json:
    """Return a document, with every key, for sides that could not be compared."""
    nothing = comparison_pb2.ComparedSide()
    written = document(comparison_pb2.Comparison(base=nothing, candidate=nothing))
    return {**written, "error": None if error is None else error_json(error)}


def _pair(base: Json, candidate: Json) -> comparison_pb2.ComparedPair:
    return comparison_pb2.ComparedPair(
        base=name(base),
        candidate=name(candidate),
        differs=differs(base, candidate),
        latency=latency.latency(base, candidate),
        operators=operators.operators(base, candidate),
        size=program.size(base, candidate),
        memory=program.memory(base, candidate),
        accuracy=program.accuracy(base, candidate),
        delegation=program.delegation(base, candidate),
        changes=[
            comparison_pb2.CircumstanceChange(
                what=change["what"], base=to_scalar(change["base"]), candidate=to_scalar(change["candidate"])
            )
            for change in changes.changes(base, candidate)
        ],
        generation=generation.generation(base, candidate),
    )


def _unpaired(pairing: Pairing) -> Iterator[comparison_pb2.UnpairedReport]:
    for report in pairing.base_only:
        yield comparison_pb2.UnpairedReport(side=comparison_pb2.COMPARISON_SIDE_BASE, report=name(report))
    for report in pairing.candidate_only:
        yield comparison_pb2.UnpairedReport(side=comparison_pb2.COMPARISON_SIDE_CANDIDATE, report=name(report))


def _find_unobserved(pair: comparison_pb2.ComparedPair) -> Sequence[str]:
    """Return the sides of a pair that were measured separately, and whose runs vary by an unknown amount."""
    if pair.latency.HasField("ratio"):
        return unobserved_sides(project(pair.latency))
    rates = [
        point.decode if point.HasField("decode") else point.ttft
        for point in pair.generation.points
        if point.HasField("decode") or point.HasField("ttft")
    ]
    return () if all(rate.spread_observed for rate in rates) else ("base", "candidate")


def _remedy(pair: Json, unobserved: Sequence[str]) -> str:
    """Return how to decide which side of a pair is faster."""
    if pair["latency"] is None:
        return how_to_decide_rates(pair)
    other = not pair["latency"]["same_program"] and changes.is_other_program(pair["changes"])
    return how_to_decide(pair, unobserved, other_program=other)


def _notes(
    reports: Sequence[tuple[Json, Json]], pairs: Sequence[comparison_pb2.ComparedPair], base: Side, candidate: Side
) -> Iterator[str]:
    """Yield notes that are needed to interpret the rest correctly.

    Args:
        reports: those of each pair.
        pairs: the pairs.
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
    generated = [both for pair, both in zip(pairs, reports, strict=True) if pair.HasField("generation")]
    if (lengths := next((both for both in generated if not generation.has_equal_lengths(*both)), None)) is not None:
        tokens, others = (report["generation"]["generated_tokens"] for report in lengths)
        lacks = f"Decode is not compared: the base generated {tokens:,} tokens, the candidate {others:,}"
        yield f"{lacks}. Measure both with the same number."
    if (dropped := next((pair.generation.accuracy for pair in pairs if pair.generation.accuracy.top1_dropped), None)) is not None:
        agrees = f"after {dropped.candidate.top1_agreement * 100:.1f} % of {dropped.base.tokens:,} tokens"
        others_agree = f"the base's after {dropped.base.top1_agreement * 100:.1f} %"
        tolerance = f"less by more than the tolerance of {dropped.top1_tolerance * 100:.1f} points"
        yield f"The candidate's most likely token is the reference's {agrees}, {others_agree}: {tolerance}."
    if (unclear := next((pair for pair in pairs if _find_unobserved(pair)), None)) is not None:
        unobserved = _find_unobserved(unclear)
        which = "both sides" if len(unobserved) > 1 else f"the {unobserved[0]}"
        known = f"it is not known how much runs of {which} vary: the interval may be too narrow"
        yield f"Measured in separate runs, and {known}. {_remedy(project(unclear), unobserved)}."


@dataclass(frozen=True)
class Pairing:
    """Pairs of corresponding reports in the base's order, and the remaining reports of each side in their own order."""

    pairs: tuple[tuple[Json, Json], ...]
    base_only: tuple[Json, ...]
    candidate_only: tuple[Json, ...]


def pair(base: Sequence[Json], candidate: Sequence[Json]) -> Pairing:
    """Return the pairs of corresponding reports.

    Reports correspond if they are of the same cell; else of the same model, recipe, method, threads and device; else of a device
    of the same kind. Names count, not digests, since a changed model or recipe is what is to be compared. Several reports with
    one key are paired in order. A cell that was never placed, and so has no device, corresponds to one of the same model, recipe
    and method. If each side has a single report, the two are always paired.
    """
    if len(base) == len(candidate) == 1:
        return Pairing(((base[0], candidate[0]),), (), ())
    left, right = dict(enumerate(base)), dict(enumerate(candidate))
    matches: dict[int, int] = {}
    for key in (itemgetter("cell"), _on_device, _on_kind):
        _match(left, right, matches, key)
    _match_unplaced(left, right, matches)
    return Pairing(
        tuple((base[place], candidate[matches[place]]) for place in sorted(matches)), tuple(left.values()), tuple(right.values())
    )


def differs(base: Json, candidate: Json) -> list[comparison_pb2.Trait.ValueType]:
    """Return those of model, recipe, method, threads and device (its kind, if both have one) in which two reports differ."""
    traits = [trait for trait, of in _TRAITS if of(base) != of(candidate)]
    if base["device"] and candidate["device"]:
        same = base["device"]["id"] == candidate["device"]["id"] or _kind(base) == _kind(candidate)
    else:
        same = base["device"] == candidate["device"]
    return traits if same else [*traits, comparison_pb2.TRAIT_DEVICE]


def _match(
    left: dict[int, Json], right: dict[int, Json], matches: dict[int, int], key: Callable[[Json], Hashable | None]
) -> None:
    """Move reports with equal keys other than None from `left` and `right` to `matches`."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, report in right.items():
        places[key(report)].append(place)
    for place, report in list(left.items()):
        wanted = key(report)
        if wanted is not None and places[wanted]:
            matches[place] = places[wanted].pop(0)
            del left[place], right[matches[place]]


def _match_unplaced(left: dict[int, Json], right: dict[int, Json], matches: dict[int, int]) -> None:
    for place, report in list(left.items()):
        for counterpart, candidate in right.items():
            alike = all(of(report) == of(candidate) for of in (_model, _recipe, _method))
            threads = _threads(report), _threads(candidate)
            if (
                alike
                and (report["device"] is None or candidate["device"] is None)
                and (threads[0] == threads[1] or None in threads)
            ):
                matches[place] = counterpart
                del left[place], right[counterpart]
                break


def _on_device(report: Json) -> Hashable:
    return *_measured(report), report["device"]["id"] if report["device"] else None


def _on_kind(report: Json) -> Hashable:
    return *_measured(report), _kind(report)


def _measured(report: Json) -> tuple[Hashable, ...]:
    return _model(report), _recipe(report), _method(report), _threads(report)


def _model(report: Json) -> Hashable:
    return report["model"]["name"] if report["model"] else None


def _recipe(report: Json) -> Hashable:
    return report["recipe"]  # type: ignore[no-any-return]


def _method(report: Json) -> Hashable:
    return report["method"]  # type: ignore[no-any-return]


def _threads(report: Json) -> Hashable:
    return report["threads"]  # type: ignore[no-any-return]


def _kind(report: Json) -> Hashable:
    device = report["device"]
    return (device["arch"], device["soc"]) if device else None


_TRAITS: Final = (
    (comparison_pb2.TRAIT_MODEL, _model),
    (comparison_pb2.TRAIT_RECIPE, _recipe),
    (comparison_pb2.TRAIT_METHOD, _method),
    (comparison_pb2.TRAIT_THREADS, _threads),
)
