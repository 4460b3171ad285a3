"""The sides of a comparison: the selected reports of a job or of a file, and their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etfarm.v1 import common_pb2, comparison_pb2, report_pb2
from etfarm.wire.changes import encoder_inputs
from etfarm.wire.errors import Kind, UserError, error_for
from etfarm.wire.messages import fill
from etfarm.wire.report import Json
from etfarm.wire.report_keys import project
from etfarm.wire.words import value_of

CHOICE = "#"
"""The separator between a job or file and the choice of its reports: `latest#2`."""

_LEAST_PREFIX = 4
"""Minimum length of a prefix of a cell's id."""


class NothingToCompare(UserError):
    """Two sides without any corresponding reports."""

    reason = "NOTHING_TO_COMPARE"
    kind = Kind.FAILED_PRECONDITION


@dataclass(frozen=True)
class Side:
    """The reports of one job or file, REPORTs with every key, in the order of the job's cells."""

    reports: Sequence[Json]
    job: Json | None = None
    """JOB of etfarm.report/1; None if unknown."""
    file: str | None = None
    """The path of a report file."""
    choice: str | None = None
    """The text after `#`; see `chosen`."""

    @property
    def name(self) -> str:
        """The name of the side in a sentence."""
        if self.file is not None:
            return self.file
        return f"job {self.job['id']}" if self.job else "the reports"

    @property
    def chosen(self) -> list[Json]:
        """The reports that `choice` selects: all for None, one by its cell's number, else those of a recipe, model or cell.

        Numbers start at 0, as in `etfarm jobs show`.

        Raises:
            REPORT_NOT_FOUND: no report matches.
        """
        reports = list(self.reports)
        if self.choice is None:
            return reports
        if self.choice.isascii() and self.choice.isdecimal():
            matches = reports[int(self.choice) :][:1] if len(self.choice) < 10 else []
        else:
            matches = [report for report in reports if self.choice in (report["recipe"], _model(report))]
            if not matches and len(self.choice) >= _LEAST_PREFIX:
                matches = [report for report in reports if str(report["cell"]).startswith(self.choice)]
        if not matches:
            raise error_for(
                "REPORT_NOT_FOUND",
                f"{self._begin()} has no report {self.choice!r}: it has {self.listed}.",
                "Give a number, a recipe, a model, or the first characters of a cell's id.",
                choice=self.choice,
                reports=len(reports),
            )
        return matches

    @property
    def listed(self) -> str:
        """Its reports by number, for a sentence: `0 resnet8 · portable, 1 resnet8 · xnnpack_fp32`."""
        names = [f"{place} {label(project(name(report)))}" for place, report in enumerate(self.reports)]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(names[:8]) + more if names else "none"

    def about(self) -> comparison_pb2.ComparedSide:
        """Return the side without its reports."""
        job = fill(comparison_pb2.ComparedJob(), self.job) if self.job else None
        return comparison_pb2.ComparedSide(job=job, file=self.file, choice=self.choice, reports=len(self.chosen))

    def _begin(self) -> str:
        return self.name[0].upper() + self.name[1:] if self.file is None else self.name


def is_live(job: Json | None) -> bool:
    """Return whether a job has unfinished cells, whose reports do not exist yet."""
    return job is not None and job["state"] in ("QUEUED", "RUNNING")


def split_choice(text: str) -> tuple[str, str | None]:
    """Return a job or file and its choice, None for all reports: ("latest", "2") for `latest#2`."""
    what, mark, choice = text.rpartition(CHOICE)
    return (what, choice) if mark and what and choice else (text, None)


def name(report: Json) -> comparison_pb2.ComparedReport:
    """Return the identity of a REPORT, and what else a comparison says of it."""
    device, error, inputs = report["device"], report["error"], report["inputs"] or {}
    image = next(filter(None, encoder_inputs(report).values()), None)
    return comparison_pb2.ComparedReport(
        id=report["id"],
        cell=report["cell"],
        attempt=report["attempt"],
        model=_model(report),
        recipe=report["recipe"],
        method=report["method"],
        threads=report["threads"],
        device=fill(comparison_pb2.ComparedDevice(), device) if device else None,
        state=value_of(common_pb2.CellState, report["state"]),
        error=error["reason"] if error else None,
        verdict=_verdict(report["verdict"]) if report["verdict"] else None,
        cores=(report["runner"] or {}).get("cores"),
        inputs=image or inputs.get("digest"),
        inputs_from_job=image is not None or inputs.get("from_job"),
        warmup=_prescribed_warmup(report),
        timed_ns=report["measurement"]["duration_ns"] if report["measurement"] else None,
        runs=len(report["runs"]) or None,
    )


def _prescribed_warmup(report: Json) -> int | None:
    """Return the number of warm-up iterations of each run; None if they ended when the median was steady."""
    run = report["runs"][0] if report["runs"] else None
    return None if run is None or run["steady"] is not None else run["warmup"]


def _verdict(verdict: Json) -> comparison_pb2.ComparedVerdict:
    """Return the status of a VERDICT and the codes of its reasons, of which a damaged document may lack one."""
    codes = [reason["code"] for reason in verdict["reasons"] if reason["code"]]
    return comparison_pb2.ComparedVerdict(status=value_of(report_pb2.VerdictStatus, verdict["status"]), codes=codes)


def label(named: Json) -> str:
    """Return the label of a REPORT_NAME for users: `resnet8 · xnnpack_fp32 · pi5-a (cortex-a76, 4 threads)`."""
    return " · ".join(filter(None, traits(named)))


def traits(named: Json) -> tuple[str, str | None, str | None, str | None]:
    """Return the distinguishing parts of a REPORT_NAME: model, recipe, method and device; None for an absent part."""
    device, place = named["device"], None
    if device:
        chip = device["soc"] or device["arch"]
        count = named["threads"]
        threads = f"{count} thread{'' if count == 1 else 's'}" if count else None
        inside = ", ".join(filter(None, (chip, threads)))
        place = (device["name"] or (device["id"] or "")[:12]) + (f" ({inside})" if inside else "")
    method = named["method"] if named["method"] != "forward" and device else None
    return named["model"] or "?", named["recipe"], method, place


def _model(report: Json) -> str | None:
    return report["model"]["name"] if report["model"] else None
