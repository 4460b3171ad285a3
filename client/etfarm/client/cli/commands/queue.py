"""`etfarm queue`: what waits for a device, and for what."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from etfarm.client.cli.app import execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.listing import JsonListing, Key

if TYPE_CHECKING:
    from etfarm.client.models import Queue

_ID_CHARACTERS = 8
"""Number of shown characters of an id, which leaves room and still identifies the job."""


def main(argv: list[str]) -> int:
    """Run `etfarm queue`."""
    return execute(queue, argv, "queue")


def queue(listing: Annotated[JsonListing, Key("queue", is_list=False)], connection: Connection) -> None:
    """Show what waits for a device, in its order: cells of jobs, and sessions.

    PRIORITY is as submitted. AGED orders the queue: it adds the time since the submission and the nearness of a deadline, and
    subtracts for what the project and the owner have used lately. STARTS IN is an estimate from earlier equal runs; without such
    runs it is empty.
    """
    waiting = listing.record(connection.call(lambda farm: farm.queue()))
    if not listing.is_on_stdout:
        _show(waiting)


def _show(waiting: Queue) -> None:
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units
    from etfarm.client.jobs import summary

    now = datetime.now(UTC)
    several = len({run.project for run in waiting.runs}) > 1
    rows = [
        (
            str(run.rank),
            (run.job_id or run.session_id)[:_ID_CHARACTERS],
            summary.describe_run(run),
            *((run.project,) if several else ()),
            run.owner,
            str(run.priority),
            f"{run.aged_priority - run.share_penalty:.1f}",
            units.ago(run.waiting_since, now),
            units.clock(max(0.0, (run.starts_at - now).total_seconds())) if run.starts_at else "",
            run.waiting_for or "its turn",
        )
        for run in waiting.runs
    ]
    heads = ("RANK", "JOB", "WHAT", *(("PROJECT",) if several else ()), "OWNER", "PRIORITY", "AGED", "SINCE", "STARTS IN", "FOR")
    if rows:
        output.show_table(heads, rows, right=("RANK", "PRIORITY", "AGED", "STARTS IN"), shrink=("WHAT", "FOR"))
    if waiting.other_runs:
        runs = units.count(waiting.other_runs, "run")
        print(f"{runs} of other projects {'waits' if waiting.other_runs == 1 else 'wait'}{' too' if rows else ''}.")
    elif not rows:
        print("Nothing waits for a device.")
