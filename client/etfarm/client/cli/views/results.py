"""The result of a job on the terminal, or its id when the command does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.text import Text

from etfarm.client.cli.terminal import output
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.views import render

if TYPE_CHECKING:
    from etfarm.client.models import JobResult


def print_result(
    result: JobResult, *, to_stderr: bool, top: int | None = None, jobs: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Print a job's reports and the commands that show them again.

    Args:
        top: number of operators of each report, 0 for all; the default number when None.
        jobs: the ids of other jobs by the ids of the reports that are from them.
    """
    console = output.open_console(to_stderr=to_stderr)
    document = result.json()
    reports = render.reports(
        document["reports"], width=console.width, top=render.TOP if top is None else top, job=result.job.id, jobs=jobs
    )
    foot = [Text(f"job {result.job.id}  {result.state.value}  etfarm report show {result.job.id}", style="dim")]
    for report in document["reports"]:
        if (other := jobs.get(report["id"], result.job.id)) != result.job.id:
            foot.append(Text(f"job {other}  {render.label(report)}  etfarm report show {other}", style="dim"))
    output.say(console, reports, *foot)


def print_detached(job_id: str, *, to_stderr: bool) -> None:
    """Print a job's id, alone on its stream, and on stderr the commands that watch and show it."""
    tell(job_id, to_stderr=to_stderr)
    tell(f"The job continues: `etfarm jobs watch {job_id}`, then `etfarm report show {job_id}`.", to_stderr=True)
