"""Sources of reports: a job of a farm, or a file that `--json` wrote, which needs no farm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etfarm.client.cli.connection import Connection
from etfarm.client.cli.outcome import Outcome
from etfarm.wire import comparison

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm

JobOrFile = Annotated[
    str,
    typer.Argument(
        metavar="JOB|FILE",
        help="A job's id or its start, a tag, a name or latest; or x.json, written by --json. #N chooses as in `etfarm compare`.",
    ),
]

Reports = Annotated[
    list[str] | None,
    typer.Option("--report", metavar="R", help="Only this report: its number from 0, or the start of its cell's id; repeatable."),
]


@dataclass(frozen=True)
class ReportDocument:
    """The reports of a job or of a file."""

    document: dict[str, Any]
    """{schema, job, reports, error} of etfarm.report/1, with every key that this version knows."""
    job: str
    """The job's id in the farm; empty for a file, whose job may be unknown to the farm."""


def find(name: str, outcome: Outcome, connection: Connection, *, with_series: bool) -> ReportDocument:
    """Return the reports that JOB|FILE names; for a job, those of the finished cells.

    Args:
        name: a job or a file; a text after `#` chooses of its reports, as in `etfarm compare`.
        with_series: as in `AsyncJob.document`; a file has what it has.

    Raises:
        BadDocument: the file does not exist, or has other content.
        REPORT_NOT_FOUND: no report matches the choice after `#`.
        EtfarmError: JOB_NOT_FOUND; SERVER_UNREACHABLE.
    """
    from etfarm.client.jobs import report_file

    name, choice = comparison.split_choice(name)
    if report_file.is_named(name):
        return ReportDocument(chosen(report_file.read(Path(name)), name, choice), "")

    async def fetch(farm: AsyncFarm) -> ReportDocument:
        job = await farm.job(name)
        return ReportDocument(chosen(await job.document(with_series=with_series), None, choice), job.id)

    return connection.call(fetch, outcome)


def chosen(document: dict[str, Any], file: str | None, choice: str | None) -> dict[str, Any]:
    """Return the document with the reports that the text after `#` chooses; all without one.

    Raises:
        REPORT_NOT_FOUND: no report matches.
    """
    side = comparison.Side(document["reports"], document["job"], file, choice)
    return {**document, "reports": side.chosen}
