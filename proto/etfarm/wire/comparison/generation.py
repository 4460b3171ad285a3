"""The change of a language model's rates: time to the first token, prefill and decode, by prompt length and depth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from etfarm.v1 import comparison_pb2, report_pb2
from etfarm.wire import timings
from etfarm.wire.changes import encoder_inputs
from etfarm.wire.comparison import latency, uncertainty
from etfarm.wire.comparison.numbers import finite, measure
from etfarm.wire.generation import METRICS
from etfarm.wire.messages import fill
from etfarm.wire.report import Json
from etfarm.wire.words import value_of

KEYS: Final = {"ttft": "ttft_ns", "prefill": "prefill_tokens_per_s", "decode": "decode_tokens_per_s"}
"""Keys of a changed point, each with the key of REPORT.generation.points that it compares."""
_DECODE: Final = "decode"
_TIMES: Final = {"ttft_ns"}
"""Metrics that are times; the others are rates."""
TOP1_TOLERANCE: Final = 0.02
"""Drop of the top-1 agreement that counts as none, however many tokens were scored."""
_STANDARD_ERRORS: Final = 2.0
"""Number of standard errors of the difference of two agreements within which a drop counts as none."""

_NOTHING: Final[Json] = {"references": (), "is_text": False, "tokens": 0, "perplexity": None, "perplexity_tokens": 0}


def generation(base: Json, candidate: Json) -> comparison_pb2.GenerationChange | None:
    """Return the change of the generated text; None without a common prompt length and depth and without an accuracy.

    Decode is compared for equal numbers of tokens only: it slows down as the context grows.
    """
    old, new = _points(base), _points(candidate)
    same_program = (
        latency.is_same_program(base, candidate)
        and _prefill_method(base) == _prefill_method(candidate)
        and encoder_inputs(base) == encoder_inputs(candidate)
    )
    keys = {key: metric for key, metric in KEYS.items() if key != _DECODE or has_equal_lengths(base, candidate)}
    points = [
        comparison_pb2.GenerationPointChange(
            prompt_tokens=place[0],
            depth=place[1],
            base_verdict=_status(old[place]),
            candidate_verdict=_status(point),
            parts=_parts(old[place], point),
            **{key: _change(old[place], point, metric, same_program) for key, metric in keys.items()},
        )
        for place, point in new.items()
        if place in old
    ]
    accuracy = logits(base, candidate) if base["generation"] and candidate["generation"] else None
    if not points and not (accuracy and accuracy.HasField("base") and accuracy.HasField("candidate")):
        return None
    return comparison_pb2.GenerationChange(points=points, same_program=same_program, accuracy=accuracy)


def _parts(base: Json, candidate: Json) -> Iterator[comparison_pb2.GenerationPartChange]:
    """Yield what each method of a point takes on both sides, in the candidate's order."""
    sides = [{part["method"]: part for part in point["parts"]} for point in (base, candidate)]
    for method in dict.fromkeys([*sides[1], *sides[0]]):
        prefill, decode = (measure(*((side.get(method) or {}).get(key) for side in sides)) for key in ("prefill_ns", "decode_ns"))
        yield comparison_pb2.GenerationPartChange(method=method, prefill_ns=prefill, decode_ns=decode)


def has_equal_lengths(base: Json, candidate: Json) -> bool:
    """Return whether two reports generated the same number of tokens in each repetition."""
    lengths = [report["generation"] and report["generation"]["generated_tokens"] for report in (base, candidate)]
    return bool(lengths[0] == lengths[1])


def _points(report: Json) -> dict[tuple[int, int], Json]:
    generated = report["generation"]
    return {(point["prompt_tokens"], point["depth"]): point for point in generated["points"]} if generated else {}


def _prefill_method(report: Json) -> str | None:
    model = report["generation"] and report["generation"]["model"]
    return model["prefill_method"] if model else None


def _status(point: Json) -> report_pb2.VerdictStatus.ValueType:
    return value_of(report_pb2.VerdictStatus, (point["verdict"] or {}).get("status"))


def _change(base: Json, candidate: Json, metric: str, same_program: bool) -> comparison_pb2.RateChange | None:
    """Return how a number changed; None if neither side has it.

    Its interval covers the variation between processes as far as it was observed, by the rules for latencies: a rate is compared
    as the time for a token.
    """
    if base[metric] is None and candidate[metric] is None:
        return None
    change = comparison_pb2.RateChange(base=base[metric], candidate=candidate[metric])
    if (times := latency.separate(_timed(base, metric), _timed(candidate, metric))) is None:
        return change
    ratio, ends = finite(times.ratio if metric in _TIMES else 1 / times.ratio), times.ci95
    if ends and metric not in _TIMES:
        ends = (1 / ends[1], 1 / ends[0])
    if ratio is not None:
        change.ratio = ratio
    change.ratio_ci95.extend(ends if ends and all(map(math.isfinite, ends)) else ())
    change.outcome = latency.outcome(times, same_program=same_program)
    change.spread_observed = times.is_observed
    return change


def _timed(point: Json, metric: str) -> Json:
    """Return a number of a point in the form of a REPORT's latency, and its processes as that of its spread."""
    value, interval = point[metric], point[METRICS[metric]]
    runs = [run for run in point["runs"] if run[metric]]
    valid = [run for run in runs if (run["verdict"] or {}).get("status") == "VALID"] or runs
    spread = None
    if len(valid) >= uncertainty.MIN_RUNS:
        logs = [math.log(run[metric]) for run in valid]
        # A few processes may agree better than their repetitions allow.
        error = math.sqrt(statistics.fmean(_error(run, metric) ** 2 for run in valid))
        spread = {"source": "REPEATS", "runs": len(valid), "relative_stddev": max(statistics.stdev(logs), error)}
    if metric not in _TIMES and value:
        interval = [1e9 / interval[1], 1e9 / interval[0]] if uncertainty.is_usable(interval) else None
        value = 1e9 / value
    return {"latency": {"p50_ns": value, "p50_ci95_ns": interval}, "run_spread": spread}


def _error(run: Json, metric: str) -> float:
    """Return the standard error of the logarithm of a process's number; 0 if it is unknown."""
    ends = run[METRICS[metric]]
    return math.log(ends[1] / ends[0]) / (2 * timings.NORMAL_QUANTILE) if uncertainty.is_usable(ends) else 0.0


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
