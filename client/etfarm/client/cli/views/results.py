"""The result of a job on the terminal, or its id when the command does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from etfarm.client.cli.terminal import output
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.views import render

if TYPE_CHECKING:
    from etfarm.client.models import JobResult


def print_result(result: JobResult, *, to_stderr: bool) -> None:
    """Print a job's reports and the command that shows them again."""
    console = output.open_console(to_stderr=to_stderr)
    document = result.json()
    reports = render.reports(document["reports"], width=console.width, job=result.job.id)
    foot = Text(f"job {result.job.id}  {result.state.value}  etfarm report show {result.job.id}", style="dim")
    output.say(console, reports, foot)


def print_detached(job_id: str, *, to_stderr: bool) -> None:
    """Print a job's id, alone on its stream, and on stderr the commands that watch and show it."""
    tell(job_id, to_stderr=to_stderr)
    tell(f"The job continues: `etfarm jobs watch {job_id}`, then `etfarm report show {job_id}`.", to_stderr=True)
