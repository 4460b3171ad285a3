"""`JobResult`, the reports of a job: the document etfarm.report/1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Self

from etfarm.client.errors import JobFailed, OutputUnwritable, SeveralReports
from etfarm.client.reports.documents import ErrorFacts, JobFacts, Report
from etfarm.client.reports.enums import CellState, JobState
from etfarm.client.reports.json_object import JsonObject
from etfarm.wire.errors import Fault, error_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Final = "etfarm.report/1"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JobResult(JsonObject):
    """The result of a job: all its reports, including those of failed cells."""

    schema: str = SCHEMA
    """The schema of the document."""
    job: JobFacts
    reports: tuple[Report, ...] = ()
    """One report for each cell, in the order of the cells."""
    error: ErrorFacts | None = None
    """Why the command that wrote the document failed; None if it did not."""

    def __repr__(self) -> str:
        count = f"{len(self.reports)} report{'s' if len(self.reports) != 1 else ''}"
        return f"JobResult({self.job.id!r}, {self.job.state}, {count})"

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """Parse a document that `--json` or `etfarm report export --format json` wrote.

        Raises:
            BadDocument: the text is no document etfarm.report/1 of a job.
        """
        from etfarm.wire import report

        return cls.from_dict(report.loads(text))

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self.job.state

    @property
    def report(self) -> Report:
        """The report of a job with exactly one.

        Raises:
            EtfarmError: the cell failed; this is the cell's error.
            JobFailed: the job has several cells, and one failed.
            SeveralReports: the job has several reports, or no report.
        """
        if len(self.reports) == 1:
            (report,) = self.reports
            if (failure := report.failure) is not None:
                raise failure
            if report.state == CellState.CANCELLED:
                raise error_of(Fault.USER, "CANCELLED", f"Job {self.job.id} was cancelled.")
            return report
        failed = [
            f"{report.model.name if report.model else '?'} ({report.error.reason})" for report in self.reports if report.error
        ]
        if failed:
            raise JobFailed(self.job.id, failed, len(self.reports))
        raise SeveralReports(self.job.id, len(self.reports))

    def save_html(self, path: str | Path) -> None:
        """Write all reports to one HTML file that needs no network.

        `etfarm.client.formats` has the other formats.

        Raises:
            OutputUnwritable: the file cannot be written.
        """
        from etfarm.client.formats import html

        try:
            Path(path).write_bytes(html.write(self.to_dict()))
        except OSError as error:
            raise OutputUnwritable(f"{path} cannot be written: {error.strerror}.", "Give another path.", path=path) from None

    def to_pandas(self, table: Literal["operators", "samples", "generation", "tokens"] = "operators") -> pd.DataFrame:
        """Return the operators or the samples of all reports as a pandas DataFrame; see `Report.to_pandas`.

        Raises:
            ValueError: there is no such table.
            EXTRA_MISSING: pandas is not installed.
        """
        from etfarm.client.reports.frames import document_frame

        return document_frame(self.to_dict(), table)

    def _repr_html_(self) -> str:
        from etfarm.client.formats import notebook

        return notebook.job(self.to_dict())
