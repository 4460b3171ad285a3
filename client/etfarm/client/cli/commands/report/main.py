"""`etfarm report`: a job's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etfarm.client import formats
from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.commands.report import documents
from etfarm.client.cli.commands.report.export import export
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.formats import units
from etfarm.wire import views
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.models import JobResult


def main(argv: list[str]) -> int:
    """Run `etfarm report`."""
    commands: dict[str, Command] = {"show": show, "export": export, "tag": tag, "analyze": analyze}
    return execute(commands, argv, "report", "Show and export a job's reports, name jobs, and analyze reports again.")


def show(
    outcome: Outcome,
    connection: Connection,
    job: documents.JobOrFile,
    by: Annotated[
        str | None, typer.Option("--by", metavar="|".join(views.BY), help="Group operators; modules are a tree. [each by itself]")
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="|".join(views.SORTS), help="With --by: what comes first. [total]")
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top", metavar="N", min=0, help="Number of rows; 0: all. [10; with --by 30]")
    ] = None,
    report: documents.Reports = None,
    json: options.JsonFile = None,
) -> int:
    """Show a job's reports, those of finished cells while it runs; or those of a file."""
    from rich.text import Text

    from etfarm.client.cli.terminal import output
    from etfarm.client.cli.views import groupings as grouped
    from etfarm.client.cli.views import render

    outcome.goes_to(json)
    if by is None and sort is not None:
        raise error_for("USAGE", "--sort requires --by.", f"Give --by {', '.join(views.BY)} too.")
    if by is not None:
        views.check(by, sort or "total")
    source = documents.find(job, outcome, connection, with_series=json is not None)
    document = formats.only(source.document, report or ())
    outcome.document = lambda error: document
    console = output.open_console(to_stderr=json == STDOUT)
    reports = document["reports"]
    if by is not None:
        shown = grouped.reports(reports, by, sort or "total", width=console.width, top=top)
    else:
        top = render.TOP if top is None else top
        shown = render.reports(reports, width=console.width, top=top, job=job)
    about = source.document["job"]
    output.say(console, shown, *([Text(f"job {about['id']}  {about['state']}", style="dim")] if about else ()))
    return 0


def tag(
    connection: Connection,
    job: options.JobId,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, dots, dashes and underscores.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag, as does `tag NAME --remove`.")] = False,
) -> None:
    """Name a job, as a baseline: the name stands for it wherever a job's id does. It moves from the job that had it."""
    if not name and not remove:
        raise error_for("USAGE", "A tag's name is missing.", "Give for example `etfarm report tag latest baseline`.")

    async def change(farm: AsyncFarm) -> str:
        if remove:
            had = await farm.untag(name or job, job if name else "")
            return f"Job {had} is no longer {name or job}."
        tagged = (await farm.job(job)).id
        before = await farm.tag(tagged, name)
        moved = f"; before it was job {before}" if before and before != tagged else ""
        return f"Job {tagged} is {name}{moved}."

    tell(connection.call(change))


def analyze(outcome: Outcome, connection: Connection, job: options.JobId, json: options.JsonFile = None) -> int:
    """Analyze a job's reports again from the stored files, with the server's version, and replace the old ones."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.cli.views import render

    outcome.goes_to(json)

    async def work(farm: AsyncFarm) -> JobResult:
        return await farm.analyze((await farm.job(job)).id)

    result = connection.call(work, outcome)
    outcome.document = lambda error: result.json()
    console = output.open_console(to_stderr=json == STDOUT)
    reports = result.json()["reports"]
    output.say(console, render.reports(reports, width=console.width, top=render.TOP, job=result.job.id))
    output.say(console, output.line(f"job {result.job.id}  {worked_out(reports)}", style="dim"))
    return 0


def worked_out(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return how many reports were analyzed, by which version, and why the others were not."""
    done = [report["analysis"] for report in reports if report["analysis"]]
    again = sum(not analysis["cached"] for analysis in done)
    others = [report["state"] for report in reports if not report["analysis"]]
    compiled = others.count("SUCCEEDED")
    counts = (
        (len(done) - again, "known already"),
        (compiled, "only compiled, so nothing ran on a device"),
        (len(others) - compiled, "not measured to the end, so there is nothing to analyze"),
    )
    parts = [f"{again} of {units.count(len(reports), 'report')} analyzed again"]
    parts += [f"{count} {why}" for count, why in counts if count]
    versions = ", ".join(sorted({analysis["version"] for analysis in done}))
    return f"{', '.join(parts)}{f'  etfarm {versions}' if versions else ''}"
