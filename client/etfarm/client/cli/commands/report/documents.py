"""Step 10, command line: where reports come from: a job of a farm, or a file that `--json` wrote, which needs no farm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.outcome import Outcome

JobOrFile = Annotated[
    str,
    typer.Argument(metavar="JOB|FILE", help="A job's id, its first characters, a tag or latest; or x.json, what --json wrote."),
]


@dataclass(frozen=True)
class Found:
    """The reports of a job or of a file."""

    document: dict[str, Any]
    """{schema, job, reports, error} of etfarm.report/1, with every key that this version knows."""
    job: str
    """The id of the job in the farm; empty where it came from a file, of whose job no farm may know."""


def find(name: str, outcome: Outcome, *, server: str | None, tls_ca: str | None) -> Found:
    """The reports that JOB|FILE names: of a job those of the cells that are done.

    Raises:
        BadDocument: there is no such file, or it holds something else.
        EtfarmError: JOB_NOT_FOUND; SERVER_UNREACHABLE.
    """
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.jobs import report_file

    if report_file.is_named(name):
        return Found(report_file.read(Path(name)), "")

    async def fetch() -> Found:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            job = await farm.job(name)
            return Found(await job.document(), job.id)

    return run_async(fetch, outcome)
