"""What `etfarm bench` requires of each report: a valid verdict, a median below a limit, outputs above an SQNR or an agreement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.views import render
from etfarm.client.formats import sentences, units
from etfarm.client.models import JobResult
from etfarm.wire.sqnr import decibels

Json = Mapping[str, Any]

WORSE: Final = 3
"""Exit code if a report does not meet a requirement."""
INCONCLUSIVE: Final = 5
"""Exit code if it cannot be told whether a report meets a requirement: repeating the measurement may decide it."""

_UNSEEN_NEIGHBOUR_FACTOR: Final = 2.0
"""How many times as long a whole run may take beside a busy neighbour that no device shows: up to 1.8 was measured."""

_REPEAT: Final = "More runs narrow the interval: --repeat 5 or more."
_RETRY: Final = "Measure again, as --retry-invalid does."
_OTHER_DEVICE: Final = "Measure on another device, with --device."


@dataclass(frozen=True)
class Shortfall:
    """A requirement that a report does not meet, or that cannot be decided."""

    report: str
    """Id of the report."""
    requirement: str
    """The option, such as `--max-p50`."""
    exit_code: int
    """WORSE or INCONCLUSIVE."""
    message: str
    """One sentence, and a remedy if there is one."""

    def json(self) -> dict[str, Any]:
        """Return the shortfall as an object of the document."""
        outcome = "worse" if self.exit_code == WORSE else "inconclusive"
        return {"report": self.report, "requirement": self.requirement, "outcome": outcome, "message": self.message}


@dataclass(frozen=True)
class Requirements:
    """The requirements of one command; None and False require nothing."""

    valid: bool = False
    min_sqnr_db: float | None = None
    max_p50_ns: float | None = None
    min_top1: float | None = None
    """Minimum top-1 agreement, 0 to 1."""
    strict_quantization: bool = False
    """Whether a recipe that quantizes must quantize each method."""
    retries: int = 0
    """Number of tries of `--retry-invalid`."""

    def __bool__(self) -> bool:
        return (
            self.valid
            or self.strict_quantization
            or any(limit is not None for limit in (self.min_sqnr_db, self.max_p50_ns, self.min_top1))
        )

    def options(self) -> list[str]:
        """Return the options that are set."""
        named = {"--require-valid": self.valid}
        if self.max_p50_ns is not None:
            named[f"--max-p50 {units.time(self.max_p50_ns)}"] = True
        if self.min_sqnr_db is not None:
            named[f"--min-sqnr {self.min_sqnr_db:g} dB"] = True
        if self.min_top1 is not None:
            named[f"--min-top1 {self.min_top1:.4g}"] = True
        named["--strict-quantization"] = self.strict_quantization
        return [option for option, is_set in named.items() if is_set]

    def failures(self, reports: Sequence[Json]) -> list[str]:
        """Return the messages of requirements that are certainly not met."""
        return [each.message for each in self.shortfalls(reports) if each.exit_code == WORSE]

    def shortfalls(self, reports: Sequence[Json]) -> list[Shortfall]:
        """Return what keeps reports from meeting the requirements, in their order. Failed cells are left out."""
        return [shortfall for report in reports if report["state"] == "SUCCEEDED" for shortfall in self._of(report)]

    def json(self, shortfalls: Sequence[Shortfall]) -> dict[str, Any]:
        """Return the requirements and their outcome as the key `requirements` of a document."""
        return {
            "valid": self.valid, "min_sqnr_db": self.min_sqnr_db, "max_p50_ns": self.max_p50_ns, "min_top1": self.min_top1,
            "strict_quantization": self.strict_quantization,
            "passed": not shortfalls, "reasons": [shortfall.json() for shortfall in shortfalls],
        }  # fmt: skip

    def _remedy(self, verdict: str | None) -> str:
        """Return the remedy for a latency with this verdict, which is not VALID."""
        if verdict == "NOT_BENCHMARKABLE":
            return _OTHER_DEVICE
        if verdict != "INVALID" or not self.retries:
            return _RETRY
        return (
            f"--retry-invalid measured it again, {units.count(self.retries, 'time')} at most: follow the remedies of its report."
        )

    def _of(self, report: Json) -> Iterator[Shortfall]:
        verdict = (report["verdict"] or {}).get("status")
        if verdict != "VALID" and (self.valid or self.max_p50_ns is not None):
            option = "--require-valid" if self.valid else "--max-p50"
            codes = ", ".join(reason["code"] for reason in (report["verdict"] or {}).get("reasons", ()))
            subject = "generation" if report["generation"] else "latency"
            what = f"the {subject} is {(verdict or 'not judged').replace('_', ' ')}{f' ({codes})' if codes else ''}"
            yield Shortfall(report["id"], option, INCONCLUSIVE, f"{render.label(report)}: {what}. {self._remedy(verdict)}")
        elif self.max_p50_ns is not None:
            yield from self._latency(report, self.max_p50_ns)
        if self.min_sqnr_db is not None:
            yield from self._accuracy(report, self.min_sqnr_db)
        if self.strict_quantization:
            for warning in (report["compile"] or {}).get("warnings") or ():
                if warning["code"] == sentences.QUANTIZED_NOTHING:
                    message = f"{render.label(report)}: {warning['message']}"
                    yield Shortfall(report["id"], "--strict-quantization", WORSE, message)
        if self.min_top1 is not None:
            yield from _agreement(report, self.min_top1)

    def _latency(self, report: Json, limit_ns: float) -> Iterator[Shortfall]:
        """Compare the limit with the interval that covers the variation between runs, as far as it is known."""
        latency, spread = report["latency"] or {}, report["run_spread"] or {}
        ends = spread.get("p50_ci95_ns") or latency.get("p50_ci95_ns")
        if ends is None or latency.get("p50_ns") is None:
            message = f"{render.label(report)}: the median has no interval, so --max-p50 cannot be decided. {_REPEAT}"
            yield Shortfall(report["id"], "--max-p50", INCONCLUSIVE, message)
            return
        if ends[1] <= limit_ns:
            return
        p50 = " ".join(units.estimate(latency["p50_ns"], *ends))
        limit = f"--max-p50 {units.time(limit_ns)}"
        if spread.get("source") == "PRIOR" and limit_ns < ends[0] <= _UNSEEN_NEIGHBOUR_FACTOR * limit_ns:
            what = f"p50 {p50} is above {limit}, as far as a single run can tell whose variation between runs is assumed"
            yield Shortfall(report["id"], "--max-p50", INCONCLUSIVE, f"{render.label(report)}: {what}. {_REPEAT}")
            return
        if ends[0] > limit_ns:
            yield Shortfall(report["id"], "--max-p50", WORSE, f"{render.label(report)}: p50 {p50} is above {limit}.")
            return
        of = " with the variation between runs" if spread else ""
        message = f"{render.label(report)}: the interval of p50 {p50}{of} includes {limit}. {_REPEAT}"
        yield Shortfall(report["id"], "--max-p50", INCONCLUSIVE, message)

    def _accuracy(self, report: Json, limit_db: float) -> Iterator[Shortfall]:
        limit = f"--min-sqnr {limit_db:g} dB"
        references = ((report["generation"] or {}).get("accuracy") or {}).get("references") or ()
        for each in references:
            known = each["sqnr_db"]
            of = f"{render.label(report)}: its logits"
            if known is None:
                message = f"{of} cannot be compared with the {each['reference']}, so {limit} cannot be decided."
                yield Shortfall(report["id"], "--min-sqnr", INCONCLUSIVE, message)
            elif known < limit_db:
                message = f"{of} have {decibels(known)} against the {each['reference']}, below {limit}."
                yield Shortfall(report["id"], "--min-sqnr", WORSE, message)
        if not report["accuracy"] and not references:
            message = f"{render.label(report)}: there is no reference to compare its outputs with, so {limit} cannot be decided."
            yield Shortfall(report["id"], "--min-sqnr", INCONCLUSIVE, message)
        for output in report["accuracy"] or ():
            name = f"{render.label(report)}: output {output['output']!r}"
            against = f"against the {output['reference']}" if output["reference"] else ""
            if output["nan_count"] and not output["reference_nan_count"]:
                yield Shortfall(report["id"], "--min-sqnr", WORSE, f"{name} has NaN {against}, required is {limit}.")
            elif output.get("equal_share") is not None and not output["equal"]:
                share = units.percent(output["equal_share"])
                message = f"{name} is an integer without an SQNR: {share} equal {against}, so {limit} cannot be decided."
                yield Shortfall(report["id"], "--min-sqnr", INCONCLUSIVE, message)
            elif output["sqnr_db"] is None and not output["equal"]:
                message = f"{name} cannot be compared {against}, so {limit} cannot be decided."
                yield Shortfall(report["id"], "--min-sqnr", INCONCLUSIVE, message)
            elif not output["equal"] and output["sqnr_db"] < limit_db:
                yield Shortfall(
                    report["id"], "--min-sqnr", WORSE, f"{name} has {decibels(output['sqnr_db'])} {against}, below {limit}."
                )


def _agreement(report: Json, limit: float) -> Iterator[Shortfall]:
    """Compare the limit with the top-1 agreement of each output, or of a language model's logits."""
    option = f"--min-top1 {units.percent(limit)}"
    logits = ((report["generation"] or {}).get("accuracy") or {}).get("references") or ()
    rows = [(f"after {each['tokens']:,} tokens", each) for each in logits]
    rows += [(f"of output {each['output']!r}", each) for each in report["accuracy"] or () if each["top1_agreement"] is not None]
    known = [(what, each) for what, each in rows if each["top1_agreement"] is not None]
    if not known:
        message = f"{render.label(report)}: no top-1 agreement was measured, so {option} cannot be decided."
        yield Shortfall(report["id"], "--min-top1", INCONCLUSIVE, message)
    for what, each in known:
        if each["top1_agreement"] < limit:
            agrees = f"the largest value is that of the {each['reference']} in {units.percent(each['top1_agreement'])}"
            yield Shortfall(report["id"], "--min-top1", WORSE, f"{render.label(report)}: {what}, {agrees}, below {option}.")


def report_shortfalls(required: Requirements, result: JobResult, outcome: Outcome) -> int:
    """Print what keeps a result from meeting requirements, add it to the document, and return the exit code."""
    shortfalls = required.shortfalls(result.json()["reports"])
    for shortfall in shortfalls:
        tell(f"etfarm: {shortfall.message}", to_stderr=True)
    document = outcome.document
    assert document is not None  # the job has ended
    outcome.document = lambda error: {**document(error), "requirements": required.json(shortfalls)}
    return exit_code(shortfalls)


def exit_code(shortfalls: Sequence[Shortfall]) -> int:
    """Return the exit code: 0 if all requirements are met, WORSE if one is certainly not, else INCONCLUSIVE."""
    return WORSE if any(each.exit_code == WORSE for each in shortfalls) else INCONCLUSIVE if shortfalls else 0
