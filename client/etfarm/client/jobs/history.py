"""A model's past reports, and the change of its latency from each to the next.

`trends` is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from etfarm.client import reports
from etfarm.client.formats import units
from etfarm.client.formats.answers import REFERENCES
from etfarm.client.reports.enums import VerdictStatus
from etfarm.client.transport.paging import iterate_rows
from etfarm.client.transport.stubs import Stubs
from etfarm.v1 import comparison_pb2, report_pb2
from etfarm.wire import changes, selectors
from etfarm.wire.changes import Change
from etfarm.wire.comparison import generation, latency
from etfarm.wire.errors import EtfarmError
from etfarm.wire.report import error_json, report_json
from etfarm.wire.words import word_of

if TYPE_CHECKING:
    from etfarm.client.reports import GenerationPoint, GenerationReference, Report

SCHEMA: Final = "etfarm.history/1"


@dataclass(frozen=True)
class HistoryEntry:
    """A past report of a model."""

    job: str
    """The job's id."""
    tags: tuple[str, ...]
    """The job's current tags."""
    at: datetime
    """Time at which the report was created."""
    report: Report
    """The report without samples, operators, numeric gap and telemetry series, which the job's own report has."""


@dataclass(frozen=True)
class Point:
    """One report in a series."""

    entry: HistoryEntry
    is_comparable: bool
    """Whether its latency is evidence: measured and VALID."""
    ratio: float | None
    """Its median over that of the previous comparable point: 1.1 is 10 % slower. None if either has no comparable median. Of a
    language model, it compares the times for a token of decode, if the prompt length, depth and number of tokens are the same."""
    overlaps: bool | None
    """Whether the intervals within the two measurements overlap; None if unknown. Those of one program's runs may not."""
    outcome: str | None
    """The outcome by the rules of `etfarm compare`: no_difference, faster, slower, inconclusive or too_few; None without a
    ratio."""
    changes: tuple[Change, ...]
    """What differs from the previous comparable point; without one, from the last point that was measured, or that at least
    has a program: a failed point would hide the changes.
    """

    @property
    def p50_ns(self) -> float | None:
        """The median latency in nanoseconds."""
        latency = self.entry.report.latency
        return None if latency is None else latency.p50_ns

    @property
    def decode_tokens_per_s(self) -> float | None:
        """The rate of decode of a language model, at its first prompt length and depth."""
        point = _generated(self.entry.report)
        return None if point is None else point.decode_tokens_per_s

    @property
    def time_ns(self) -> float | None:
        """The time that `ratio` compares: the median latency, or of a language model the time for a token, in nanoseconds."""
        timed = _timed(self.entry.report)
        return None if timed is None else timed[0]

    @property
    def verdict(self) -> str:
        """VALID, INVALID or NOT_BENCHMARKABLE; the cell's state if there are no numbers."""
        verdict = self.entry.report.verdict
        return str(verdict.status if verdict else self.entry.report.state)

    @property
    def sqnr_db(self) -> float | None:
        """The signal-to-noise ratio in dB of the worst output, or of logits, against the program before quantization.

        300 means equal. None without that reference, whatever other references the report has.
        """
        report = self.entry.report
        outputs = [row.sqnr_db for row in report.accuracy or () if row.reference == REFERENCES["EAGER"]]
        known = [*outputs, *(row.sqnr_db for row in _logits(report) if row.reference == REFERENCES["EAGER"])]
        return min((value for value in known if value is not None), default=None)

    @property
    def top1_agreement(self) -> float | None:
        """The part of a language model's tokens after which the program before quantization finds the same one most likely."""
        known = (row.top1_agreement for row in _logits(self.entry.report) if row.reference == REFERENCES["EAGER"])
        return next((value for value in known if value is not None), None)

    @property
    def perplexity(self) -> float | None:
        """The perplexity of the text on the device; None for drawn tokens."""
        generated = self.entry.report.generation
        return generated.accuracy.perplexity if generated is not None and generated.accuracy is not None else None

    @property
    def size_bytes(self) -> int | None:
        """The size of the program and its data, in bytes."""
        compiled = self.entry.report.compile
        return compiled.program.size_bytes if compiled and compiled.program else None


@dataclass(frozen=True)
class Series:
    """Reports that are comparable over time: of one model, recipe, device, method and thread count."""

    model: str
    recipe: str | None
    device: str | None
    """The device's id; None if the cell was only compiled or never placed."""
    device_name: str | None
    method: str | None
    threads: int | None
    points: tuple[Point, ...]
    """The points, oldest first."""

    @property
    def label(self) -> str:
        """What the series compares: `resnet8 · xnnpack_fp32 · pi5-a · 4 threads`."""
        place = self.device_name or (self.device or "")[:12] or "no device"
        method = self.method if self.method not in (None, "forward") else ""
        threads = units.count(self.threads, "thread") if self.threads else ""
        return " · ".join(filter(None, (self.model, self.recipe, place, method, threads)))


async def fetch(
    stubs: Stubs,
    model: str,
    *,
    device: str = "",
    recipe: str = "",
    method: str = "",
    threads: int | None = None,
    limit: int = 50,
) -> list[HistoryEntry]:
    """See `AsyncFarm.history`."""
    selectors.parse(device)
    request = report_pb2.ListHistoryRequest(model=model, device=device, recipe=recipe, method=method, threads=threads)
    rows = iterate_rows(stubs.reports.ListHistory, request, "entries", server=stubs.server, limit=limit)
    return [_entry(row) async for row in rows]


def trends(entries: Sequence[HistoryEntry]) -> tuple[Series, ...]:
    """Group reports into series; the series with the newest report comes first.

    Entries come newest first, as `AsyncFarm.history` returns them. Points that are not comparable, such as INVALID
    ones, are compared neither with their predecessor nor with their successor.
    """
    of_series: dict[tuple[object, ...], list[HistoryEntry]] = {}
    for entry in entries:
        report = entry.report
        device = report.device.id if report.device else None
        key = (_model_name(report), report.recipe, device, report.method, report.threads)
        of_series.setdefault(key, []).insert(0, entry)
    return tuple(_series(listed) for listed in of_series.values())


def describe_change(point: Point) -> tuple[str, str]:
    """Return a point's change from the previous one, and its outcome: `12.3 % slower` and `slower`, `≈ -0.4 %` and `equal`.

    The outcome of a difference that separate runs may explain is `inconclusive`: `? +3.1 %`. Both are empty without a comparable
    previous point.
    """
    if point.ratio is None:
        return "", ""
    percent = (point.ratio - 1) * 100
    if point.outcome in ("slower", "faster"):
        return f"{abs(percent):.1f} % {point.outcome}", point.outcome
    return (f"? {percent:+.1f} %", "inconclusive") if point.outcome == "inconclusive" else (f"≈ {percent:+.1f} %", "equal")


def describe_doubts(point: Point) -> str:
    """Return why a point is no evidence: `bimodal, drift`; empty if it is, or if that is unknown."""
    report = point.entry.report
    codes = [report["error"]["reason"]] if report["error"] else []
    if point.verdict == "INVALID":
        codes += [reason["code"] for reason in report["verdict"]["reasons"]]
    return ", ".join(codes).lower().replace("_", " ")


def document(model: str, entries: Sequence[HistoryEntry], error: EtfarmError | None) -> dict[str, Any]:
    """Return the document etfarm.history/1 of `etfarm history --json`: {schema, model, series, error}.

    Unknown values are null, as in etfarm.report/1.
    """
    return {
        "schema": SCHEMA,
        "model": model,
        "series": [_series_json(series) for series in trends(entries)],
        "error": None if error is None else error_json(error),
    }


def _entry(entry: report_pb2.HistoryEntry) -> HistoryEntry:
    at = entry.report.create_time.ToDatetime(tzinfo=UTC)
    return HistoryEntry(entry.job_id, tuple(entry.tags), at, reports.Report.from_dict(report_json(entry.report)))


def _series(entries: Sequence[HistoryEntry]) -> Series:
    points: list[Point] = []
    for entry in entries:
        points.append(_point(entry, _base(points)))
    report = entries[-1].report
    device = report.device
    return Series(
        _model_name(report),
        report.recipe,
        device.id if device else None,
        device.name if device else None,
        report.method,
        report.threads,
        tuple(points),
    )


def _model_name(report: Report) -> str:
    return report.model.name if report.model else ""


def _base(before: Sequence[Point]) -> Point | None:
    """Return the point that the next point is compared with: the latest of those with the most data."""
    return max(reversed(before), key=_evidence_rank, default=None)


def _evidence_rank(point: Point) -> int:
    """Return a rank of a point's comparable data: no program after a failed compile, no numbers after a failed run."""
    if point.is_comparable:
        return 3
    if point.time_ns is not None:
        return 2
    return int(point.size_bytes is not None)


def _point(entry: HistoryEntry, base: Point | None) -> Point:
    verdict = entry.report.verdict
    is_valid = verdict is not None and verdict.status is VerdictStatus.VALID
    timed = _timed(entry.report) if is_valid else None
    differing = () if base is None else tuple(changes.changes(base.entry.report.to_dict(), entry.report.to_dict()))
    before = _timed(base.entry.report) if base is not None and base.is_comparable else None
    if timed is None or before is None or _setting(base.entry.report) != _setting(entry.report):  # type: ignore[union-attr]
        return Point(entry, timed is not None, None, None, None, differing)
    outcome = _outcome(base.entry.report.to_dict(), entry.report.to_dict())  # type: ignore[union-attr]
    return Point(entry, True, timed[0] / before[0], _overlap(before[1], timed[1]), outcome, differing)


def _outcome(base: dict[str, Any], candidate: dict[str, Any]) -> str | None:
    """Return the outcome of the comparison of two separate measurements of the same setting."""
    if candidate["latency"]:
        change = latency.separate(base, candidate)
        outcome = latency.outcome(change, same_program=latency.is_same_program(base, candidate)) if change else 0
    else:
        compared = generation.generation(base, candidate)
        outcome = next((point.decode.outcome for point in compared.points if point.HasField("decode")), 0) if compared else 0
    return word_of(comparison_pb2.LatencyOutcome.DESCRIPTOR, outcome)


def _timed(report: Report) -> tuple[float, tuple[float, float] | None] | None:
    """Return the median latency, or the time for a token of decode, in ns with its interval; None without one above 0."""
    if report.latency is not None:
        return (report.latency.p50_ns, report.latency.p50_ci95_ns) if report.latency.p50_ns else None
    point = _generated(report)
    if point is None or not point.decode_tokens_per_s:
        return None
    ends = point.decode_tokens_per_s_ci95
    return 1e9 / point.decode_tokens_per_s, (1e9 / ends[1], 1e9 / ends[0]) if ends and ends[0] > 0 else None


def _generated(report: Report) -> GenerationPoint | None:
    """Return the first point of generated text that has a rate of decode."""
    points = report.generation.points if report.generation is not None else ()
    return next((point for point in points if point.decode_tokens_per_s is not None), None)


def _logits(report: Report) -> tuple[GenerationReference, ...]:
    """Return what the logits of a language model were compared with; empty if they were not."""
    generated = report.generation
    return generated.accuracy.references if generated is not None and generated.accuracy is not None else ()


def _setting(report: Report) -> tuple[int, ...]:
    """Return what the times of two reports must have in common to be compared; empty for a latency."""
    point = _generated(report)
    if point is None or report.generation is None or report.latency is not None:
        return ()
    return point.prompt_tokens, point.depth, report.generation.generated_tokens


def _overlap(old: tuple[float, float] | None, new: tuple[float, float] | None) -> bool | None:
    """Return whether two intervals overlap; None if one is unknown."""
    return (new[0] <= old[1] and old[0] <= new[1]) if old and new else None


def _series_json(series: Series) -> dict[str, Any]:
    return {
        "model": series.model,
        "recipe": series.recipe,
        "device": None if series.device is None else {"id": series.device, "name": series.device_name},
        "method": series.method,
        "threads": series.threads,
        "points": [
            {
                "job": point.entry.job,
                "tags": list(point.entry.tags),
                "at": point.entry.at.isoformat().replace("+00:00", "Z"),
                "verdict": point.verdict,
                "p50_ns": point.p50_ns,
                "ratio": point.ratio,
                "overlaps": point.overlaps,
                "outcome": point.outcome,
                "size_bytes": point.size_bytes,
                "sqnr_db": point.sqnr_db,
                "changes": [dict(change) for change in point.changes],
                "report": point.entry.report.to_dict(),
                "decode_tokens_per_s": point.decode_tokens_per_s,
                "top1_agreement": point.top1_agreement,
                "perplexity": point.perplexity,
            }
            for point in series.points
        ],
    }
