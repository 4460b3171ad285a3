"""Gates: limits on how much worse than the base a candidate may be, judged on a comparison.

A gate is passed, failed or inconclusive. It fails if something is shown to be worse than allowed, or is missing. It is
inconclusive if the latencies cannot show that: measuring again, or better, may decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from etfarm.v1 import comparison_pb2
from etfarm.wire.changes import is_other_program
from etfarm.wire.comparison import accuracy_gate, uncertainty
from etfarm.wire.comparison.finding import Finding, percent
from etfarm.wire.comparison.latency import OBVIOUS
from etfarm.wire.comparison.numbers import ratio_text
from etfarm.wire.comparison.remedy import SIDES, how_to_decide, how_to_decide_rates, how_to_measure_again
from etfarm.wire.comparison.sides import is_live, label
from etfarm.wire.errors import error_for
from etfarm.wire.report import Json

LATENCY, SIZE, MEMORY = "latency", "size", "memory"
ACCURACY, TOP1, PERPLEXITY = "accuracy", "top1", "perplexity"
TTFT, PREFILL, DECODE = "ttft", "prefill", "decode"
UNITS: Final = {
    LATENCY: "%", SIZE: "%", MEMORY: "%", ACCURACY: "dB", TTFT: "%", PREFILL: "%", DECODE: "%", TOP1: "%", PERPLEXITY: "%",
}  # fmt: skip
"""Metrics that can be limited, with their units."""

_LIMIT = re.compile(
    r"(?:(?P<metric>[a-z][a-z0-9]{0,19})\s*=)?\s*(?P<limit>\d{1,6}(?:\.\d{1,6})?)\s*(?P<unit>%|db)", re.ASCII | re.IGNORECASE
)
_SUCCEEDED: Final = "SUCCEEDED"

SHARP_PERCENT: Final = 5.0
"""How far an interval may reach above its ratio so that a gate passes although the interval spans its limit.

A gate that could not have found so large a slowdown shows nothing by passing.
"""

UNDECIDED: Final = {"JOB_LIVE", "NO_VALID_EVIDENCE", "NO_SPREAD", "TOO_FEW", "INCONCLUSIVE", "SAME_PROGRAM"}
"""Codes of reasons that show nothing to be worse: with no other reason, the gate is inconclusive."""


@dataclass(frozen=True)
class Limit:
    """The maximum deterioration of a metric, in percent of the base's value or in dB of SQNR.

    Rates count as times. Of top1 it is a difference of percentages.
    """

    metric: str
    limit: float

    @property
    def unit(self) -> str:
        """The unit: % or dB."""
        return UNITS[self.metric]

    @property
    def text(self) -> str:
        """The limit as text, such as `latency 3 %`."""
        return f"{self.metric} {self.limit:g} {self.unit}"

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Return the limit in a text: `3%` (of latency), `size=1%`, `memory=5%`, `accuracy=1dB`.

        Raises:
            BAD_GATE: the text has another form.
        """
        match = _LIMIT.fullmatch(text.strip())
        metric = (match["metric"] or LATENCY).lower() if match else ""
        if match is None or metric not in UNITS or match["unit"].lower() != UNITS[metric].lower():
            raise error_for(
                "BAD_GATE",
                f"{text!r} is not a gate.",
                "Give 3% (latency), latency=3%, size=1%, memory=5%, accuracy=1dB, top1=2%, perplexity=1%, decode=3%, prefill=3% "
                "or ttft=3%.",
                gate=text,
            )
        return cls(metric, float(match["limit"]))


@dataclass(frozen=True)
class Gate:
    """The limits that every pair must keep."""

    limits: tuple[Limit, ...]
    strict: bool = False
    """Whether a latency whose interval crosses the limit does not pass, but is inconclusive."""
    accept_invalid: bool = False
    """Whether to accept latencies whose verdict is not VALID, and those of devices of different kinds."""

    @classmethod
    def parse(cls, texts: Sequence[str], *, strict: bool = False, accept_invalid: bool = False) -> Gate | None:
        """Return the gate of `--gate` texts; None without texts.

        Raises:
            BAD_GATE: a text cannot be parsed, a metric has two limits, or an option is set without a limit.
        """
        limits = tuple(Limit.parse(text) for text in texts)
        for place, limit in enumerate(limits):
            if any(limit.metric == other.metric for other in limits[:place]):
                raise error_for("BAD_GATE", f"There are two gates for {limit.metric}.", "Give one.", metric=limit.metric)
        if not limits and (strict or accept_invalid):
            option = "--strict" if strict else "--accept-invalid"
            raise error_for("BAD_GATE", f"{option} requires --gate.", "Give --gate too, for example --gate 3%.")
        return cls(limits, strict, accept_invalid) if limits else None


def judge(document: Json, gate: Gate) -> comparison_pb2.GateResult:
    """Return the result of a gate for the document of a comparison.

    It fails if a metric is shown to be worse than allowed, or a measurement other than a latency is missing:
      latency   the whole 95 % interval of the ratio is above 1 + limit; for separate runs of an unknown spread, the ratio is
                OBVIOUS or more as well
      ttft, prefill, decode
                the same of the times to the first token, and for a token, at each common prompt length and depth
      size      the .pte with its data files is larger by more than the limit
      memory    the process's peak or the planned memory is larger by more than the limit
      accuracy  the SQNR of an output, or of a language model's logits, is lower by more than the limit, where values above
                EXACT_DB count as EXACT_DB; or the two have no common reference, or other samples
      top1      the same of the fraction of outputs or tokens whose largest value is the reference's, in percentage points
      perplexity  the perplexity of the text is higher by more than the limit
      all       a cell of the candidate failed, or a report of the base has no counterpart
    Otherwise it is inconclusive if a job is not done, or a latency decides nothing:
      - a side has no VALID one, or the devices are of different kinds, unless that is accepted
      - the two were measured in separate runs of different programs, whose spread was not observed on both sides, and the
        candidate is neither obviously slower nor obviously faster, by a factor of OBVIOUS: faster passes with a note
      - there is no interval
      - the interval spans the limit, if the gate is strict; or if the interval reaches further above the ratio than SHARP_PERCENT
        and than the limit; or if the candidate is found to be slower, by a ratio above the limit; else it passes with a note
    """
    reasons = list(_of_the_whole(document))
    notes: list[comparison_pb2.GateFinding] = []
    several = len(document["pairs"]) > 1
    for place, pair in enumerate(document["pairs"]):
        name = f"{label(pair['candidate'])}: " if several else ""
        if (failed := _failed(pair["candidate"])) is not None:
            reasons.append(_finding(failed, name, place, None))
            continue
        for limit in gate.limits:
            for finding in _JUDGES[limit.metric](pair, limit.limit, gate):
                (reasons if finding.is_reason else notes).append(_finding(finding, name, place, limit.metric))
    # What failed comes first.
    reasons.sort(key=lambda reason: reason.code in UNDECIDED)
    is_undecided = all(reason.code in UNDECIDED for reason in reasons)
    unmet = comparison_pb2.GATE_OUTCOME_INCONCLUSIVE if is_undecided else comparison_pb2.GATE_OUTCOME_FAILED
    return comparison_pb2.GateResult(
        limits=[comparison_pb2.GateLimit(metric=limit.metric, limit=limit.limit, unit=limit.unit) for limit in gate.limits],
        strict=gate.strict,
        accept_invalid=gate.accept_invalid,
        passed=not reasons,
        outcome=unmet if reasons else comparison_pb2.GATE_OUTCOME_PASSED,
        reasons=reasons,
        notes=notes,
    )


def _finding(finding: Finding, name: str, place: int | None, metric: str | None) -> comparison_pb2.GateFinding:
    return comparison_pb2.GateFinding(pair=place, metric=metric, code=finding.code, message=f"{name}{finding.message}")


def _of_the_whole(document: Json) -> Iterator[comparison_pb2.GateFinding]:
    for side in SIDES:
        job = document[side]["job"]
        if is_live(job):
            message = f"job {job['id']}, the {side}, is still {job['state']}"
            yield _finding(Finding("JOB_LIVE", message), "", None, None)
    for entry in document["unpaired"]:
        if entry["side"] == "BASE" and entry["report"]["state"] == _SUCCEEDED:
            message = f"the candidate has nothing to compare with {label(entry['report'])}; BASE#NUMBER leaves it out"
            yield _finding(Finding("MISSING", message), "", None, None)
        if entry["side"] == "CANDIDATE" and (failed := _failed(entry["report"])) is not None:
            yield _finding(failed, f"{label(entry['report'])}: ", None, None)


def _failed(candidate: Json) -> Finding | None:
    if candidate["state"] == _SUCCEEDED:
        return None
    return Finding(
        "FAILED", f"the candidate's cell {(candidate['state'] or '?').lower()} ({candidate['error'] or 'no error reported'})"
    )


def _latency(pair: Json, limit: float, gate: Gate) -> Iterator[Finding]:
    latency = pair["latency"]
    for side in SIDES:
        if latency is None or latency["p50_ns"] is None or latency["p50_ns"][side] is None:
            yield Finding("NO_VALID_EVIDENCE", f"no valid evidence: the {side} has no latency")
            return
    if not gate.accept_invalid and (message := _not_valid(pair)):
        yield Finding("NO_VALID_EVIDENCE", message)
        return
    if "device" in pair["differs"] and not gate.accept_invalid:
        message = "no valid evidence: the two were measured on devices of different kinds"
        yield Finding("NO_VALID_EVIDENCE", f"{message}; --accept-invalid accepts it")
        return
    ratio, ends = latency["ratio"], latency["ratio_ci95"]
    if ratio is None:
        yield Finding("NO_VALID_EVIDENCE", "no valid evidence: a latency of 0 ns has no ratio")
        return
    unobserved = unobserved_sides(latency)
    yield from _judge(
        ratio_text(ratio, ends) + ("" if ends else " of the base's latency"), ratio, ends, latency["outcome"], limit, gate,
        same_program=latency["same_program"],
        whose=f" of {_sides(unobserved)}" if unobserved else None, few="rounds" if latency["method"] == "paired" else "samples",
        obvious=f"; {limit:g} % is allowed", remedy=partial(_how_to_decide, pair, unobserved), needs_outcome=True,
    )  # fmt: skip


def _generation(pair: Json, limit: float, gate: Gate, key: str) -> Iterator[Finding]:
    """Judge the time for a token, or to the first one, at every prompt length and depth that both sides have."""
    generated = pair["generation"]
    points = [point for point in generated["points"] if point[key]] if generated else []
    if not points:
        yield Finding("NO_VALID_EVIDENCE", f"no valid evidence: {key} was not measured on both sides at a common point")
        return
    if "device" in pair["differs"] and not gate.accept_invalid:
        message = "no valid evidence: the two were measured on devices of different kinds"
        yield Finding("NO_VALID_EVIDENCE", f"{message}; --accept-invalid accepts it")
        return
    for point in points:
        where = f"{key}, prompt {point['prompt_tokens']:,} at depth {point['depth']:,}"
        invalid = [side for side in SIDES if point[f"{side}_verdict"] != "VALID"]
        if invalid and not gate.accept_invalid:
            message = f"{where}: no valid evidence: the {' and the '.join(invalid)} is not VALID"
            yield Finding("NO_VALID_EVIDENCE", f"{message}; --accept-invalid accepts it")
            continue
        missing = [side for side in SIDES if point[key][side] is None]
        if missing or not point[key]["ratio"]:
            what = f"the {' and the '.join(missing)} did not measure it" if missing else "its numbers have no ratio"
            yield Finding("NO_VALID_EVIDENCE", f"{where}: no valid evidence: {what}")
            continue
        change, is_time = point[key], key == TTFT
        ratio, ends = change["ratio"], change["ratio_ci95"]
        # As times, of which more is worse.
        times = ends if is_time or not ends else [1 / ends[1], 1 / ends[0]]
        yield from _judge(
            f"{where}: {ratio_text(ratio, ends)}", ratio if is_time else 1 / ratio, times,
            change["outcome"], limit, gate, same_program=generated["same_program"],
            whose=None if change["spread_observed"] else "", few="repetitions",
            remedy=partial(how_to_decide_rates, pair), more=", or more repeats",
        )  # fmt: skip


def _judge(
    text: str,
    ratio: float,
    ends: Sequence[float] | None,
    outcome: str | None,
    limit: float,
    gate: Gate,
    *,
    same_program: bool,
    whose: str | None,
    few: str,
    remedy: Callable[[], str],
    obvious: str = "",
    more: str = "",
    needs_outcome: bool = False,
) -> Iterator[Finding]:
    """Judge a ratio of times.

    Args:
        text: the ratio for people.
        ratio, ends: the ratio and its interval, above 1 where the candidate is slower.
        whose: of which sides it is not known how much runs vary, as the rest of a clause; None if it is known of both.
        few: what there may be too few of.
        remedy: returns how to decide.
        more: the end of that sentence for an interval that is too wide.
        obvious: the end of the sentence on what is slower by more than separate runs differ.
        needs_outcome: whether only the outcome `slower` is one.
    """
    allowed, is_slower = 1 + limit / 100, outcome == "slower"
    if same_program:
        if ratio > allowed:
            message = f"same program, {text}: a difference between runs or their circumstances, not between programs"
            yield Finding("SAME_PROGRAM", message, is_reason=False)
    elif whose is not None and is_slower and ends is not None and ends[0] > allowed:
        yield Finding("SLOWER", f"slower by more than separate runs of one program differ ({OBVIOUS:g}x), {text}{obvious}")
    elif whose is not None and outcome == "faster":
        message = f"faster by more than separate runs of one program differ ({OBVIOUS:g}x), {text}"
        yield Finding("FASTER", f"{message}; it is not known how much runs{whose} vary", is_reason=False)
    elif whose is not None:
        message = f"{text} in separate runs does not show whether it is within {limit:g} %: it is not known how much runs"
        yield Finding("NO_SPREAD", f"{message}{whose} vary. {remedy()}")
    elif ends is None:
        yield Finding("TOO_FEW", f"{text}, and too few {few} to tell whether that is within {limit:g} %")
    elif ends[0] > allowed and (is_slower or not needs_outcome):
        yield Finding("SLOWER", f"at least {percent(ends[0] - 1)} slower, {text}; {limit:g} % is allowed")
    elif ends[1] > allowed:
        message = f"{text} does not show whether it is within {limit:g} %. {remedy()}{more}"
        yield Finding("INCONCLUSIVE", message, gate.strict or ends[0] > allowed or not _is_within(ratio, ends, limit))


def _is_within(ratio: float, ends: Sequence[float], limit: float) -> bool:
    """Return whether a ratio whose interval spans the limit passes.

    It must be precise enough to find what the gate is for: SHARP_PERCENT, or the limit if that is wider. And it must not be that
    of a slowdown that was found, which is more likely than not above the limit.
    """
    is_sharp = ends[1] / ratio - 1 <= max(SHARP_PERCENT, limit) / 100
    return is_sharp and not (ends[0] > 1 and ratio > 1 + limit / 100)


def _not_valid(pair: Json) -> str:
    """Return which latencies of a pair are not VALID, and what to do; empty if both are."""
    verdicts = {side: pair[side]["verdict"] or {"status": None, "codes": []} for side in SIDES}
    sides = [side for side, verdict in verdicts.items() if verdict["status"] != "VALID"]
    if not sides:
        return ""
    parts = []
    for side in sides:
        codes = f" ({', '.join(verdicts[side]['codes'])})" if verdicts[side]["codes"] else ""
        parts.append(f"the {side}'s latency is {(verdicts[side]['status'] or 'not judged').replace('_', ' ')}{codes}")
    message = f"no valid evidence: {' and '.join(parts)}"
    invalid = [side for side in sides if verdicts[side]["status"] == "INVALID"]
    if invalid:
        message += f". {how_to_measure_again(pair, invalid)}"
    return f"{message}; --accept-invalid accepts {'both' if len(sides) == 2 else 'it'}"


def _how_to_decide(pair: Json, unobserved: Sequence[str]) -> str:
    return how_to_decide(pair, unobserved, other_program=is_other_program(pair["changes"]))


def _sides(names: Sequence[str]) -> str:
    return f"the {names[0]}" if len(names) == 1 else "both sides"


def unobserved_sides(latency: Json) -> list[str]:
    """Return the sides whose variation between runs the interval of a PAIR's latency does not cover."""
    if latency["method"] == "paired":
        return []
    return [side for side in SIDES if not uncertainty.is_observed(latency[f"{side}_spread"] or {})]


def _size(pair: Json, limit: float, gate: Gate) -> Iterator[Finding]:
    yield from _grown(pair["size"], (("total_bytes", "the program"),), limit, "LARGER", "size")


def _memory(pair: Json, limit: float, gate: Gate) -> Iterator[Finding]:
    keys = (("peak_rss_bytes", "peak memory"), ("planned_bytes", "planned memory"))
    yield from _grown(pair["memory"], keys, limit, "MORE_MEMORY", "memory")


def _grown(part: Json | None, keys: Sequence[tuple[str, str]], limit: float, code: str, metric: str) -> Iterator[Finding]:
    known = [(what, number) for key, what in keys if (number := (part or {}).get(key)) and number["change"] is not None]
    if not known:
        yield Finding("NOT_MEASURED", f"{metric} is not known for both sides")
    for what, number in known:
        if number["candidate"] > number["base"] * (1 + limit / 100):
            grown = f"{percent(number['candidate'] / number['base'] - 1)} more" if number["base"] else "more"
            sizes = f"{number['base']:,} -> {number['candidate']:,} bytes"
            yield Finding(code, f"{what} takes {grown}, {sizes}; {limit:g} % is allowed")


def _without_gate(judge_pair: Callable[[Json, float], Iterator[Finding]]) -> Callable[[Json, float, Gate], Iterator[Finding]]:
    return lambda pair, limit, gate: judge_pair(pair, limit)


_JUDGES: Final[dict[str, Callable[[Json, float, Gate], Iterator[Finding]]]] = {
    LATENCY: _latency,
    SIZE: _size,
    MEMORY: _memory,
    ACCURACY: _without_gate(accuracy_gate.judge_sqnr),
    TOP1: _without_gate(accuracy_gate.judge_top1),
    PERPLEXITY: _without_gate(accuracy_gate.judge_perplexity),
    **{key: partial(_generation, key=key) for key in (TTFT, PREFILL, DECODE)},
}
