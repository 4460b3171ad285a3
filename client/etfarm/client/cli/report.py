"""Step 10, command line: `etfarm report`, a job's reports again."""

from __future__ import annotations

from typing import Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import STDOUT, Outcome, execute, run_async


def main(argv: list[str]) -> int:
    """Runs `etfarm report`."""
    return execute({"show": show}, argv, "report", "Shows a job's reports again.", later=("export", "tag"))


def show(
    context: typer.Context,
    job: options.JobId,
    top: Annotated[int, typer.Option("--top", metavar="N", min=0, help="So many operators; 0 is all.")] = 10,
    json: options.JsonFile = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
) -> int:
    """A job's reports, those of cells that are done while it runs."""
    from rich.text import Text

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli import output, render
    from etfarm.client.models import JobResult

    outcome: Outcome = context.obj
    outcome.goes_to(json)

    async def fetch() -> tuple[JobResult, frozenset[str]]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            found = await farm.job(job)
            return JobResult(await found.document()), found.made_up_inputs

    result, made_up = run_async(fetch, outcome)
    outcome.document = lambda error: result.json()
    console = output.open_console(to_stderr=json == STDOUT)
    documents = result.json()["reports"]
    reports = render.reports(documents, width=console.width, top=top, job=result.job.id, made_up=made_up)
    output.say(console, reports, Text(f"job {result.job.id}  {result.job.state}", style="dim"))
    return 0
