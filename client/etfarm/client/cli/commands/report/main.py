"""`etfarm report`: a job's reports."""

from __future__ import annotations

from typing import Annotated

import typer

from etfarm.client import formats
from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.commands.report import documents
from etfarm.client.cli.commands.report.export import export
from etfarm.client.cli.commands.report.tag import analyze, tag
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.wire import views
from etfarm.wire.errors import error_for


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
