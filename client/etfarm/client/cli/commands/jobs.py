"""`etfarm jobs`: submitted jobs and their progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing, Key
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.workflows import watching
from etfarm.client.errors import Interrupted
from etfarm.wire.errors import error_for

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from etfarm.client.aio import AsyncFarm
    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.models import JobInfo

_SIZE: Final = 50
"""Minimum number of jobs of a page of which those that wait are chosen."""
_PAGES: Final = 1_000
"""Maximum number of pages of which the jobs in a state are chosen."""


def main(argv: list[str]) -> int:
    """Run `etfarm jobs`."""
    commands: dict[str, Command] = {
        "list": list_, "show": show, "watch": watch, "cancel": cancel, "retry": retry, "delete": delete, "logs": logs
    }  # fmt: skip
    return execute(commands, argv, "jobs", "List, show, watch, cancel, retry and delete jobs, and read their logs.")


def list_(
    listing: Annotated[JsonListing, Key("jobs")],
    connection: Connection,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Only jobs with this text in their name.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="Only jobs with this label; repeatable.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only jobs in this state, such as FAILED or WAITING; RUNNING ones may wait; repeatable.",
        ),
    ] = None,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Only jobs that this principal submitted.")] = "",
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Only jobs with a model of this name.")] = "",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only jobs submitted since: a duration such as 2d, or an ISO time.")
    ] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of jobs, newest first.")] = 20,
) -> None:
    """List the jobs of the farm, newest first."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units
    from etfarm.client.jobs import summary
    from etfarm.client.models import JobState

    labels = options.labels_of(label or ())
    states = [text.upper() for text in state or ()]
    start = options.instant_of("--since", since) if since else None
    for wanted in states:
        if wanted not in summary.STATES:
            known = ", ".join(summary.STATES)
            raise error_for("USAGE", f"Values of --state must be job states, got {wanted!r}.", f"Use {known}.")

    # The server knows WAITING jobs as RUNNING ones.
    asked = list(dict.fromkeys(JobState.RUNNING.value if text == summary.WAITING else text for text in states))

    async def fetch(farm: AsyncFarm) -> list[JobInfo]:
        listed: list[JobInfo] = []
        size = max(limit, _SIZE) if summary.WAITING in states else limit
        token = ""
        for _ in range(_PAGES):
            page = await farm.job_page(
                token, size=size, name=name, labels=labels, states=asked, owner=owner, model=model, since=start
            )
            listed += [job for job in page.jobs if not states or {job.state.value, summary.describe_state(job)} & set(states)]
            token = page.next_page_token
            if not token or len(listed) >= limit:
                break
        return listed[:limit]

    jobs = listing.record(connection.call(fetch))
    if listing.is_on_stdout:
        return
    if not jobs:
        print("No job matches." if any((name, labels, states, owner, model, since)) else "There are no jobs.")
        return
    tagged = any(job.tags for job in jobs)
    several = len({job.project for job in jobs}) > 1
    measured = any(map(summary.describe_measurements, jobs))
    now = datetime.now(UTC)
    rows = [
        (
            job.id,
            *((", ".join(job.tags),) if tagged else ()),
            job.name,
            summary.describe_contents(job),
            summary.describe_state(job),
            *((summary.describe_measurements(job),) if measured else ()),
            *((job.project,) if several else ()),
            job.owner,
            units.ago(job.submitted_at, now),
            summary.describe_duration(job),
        )
        for job in jobs
    ]
    heads = (
        "JOB",
        *(("TAGS",) if tagged else ()),
        "NAME",
        "WHAT",
        "STATE",
        *(("P50",) if measured else ()),
        *(("PROJECT",) if several else ()),
        "OWNER",
        "SUBMITTED",
        "TOOK",
    )
    output.show_table(heads, rows, right=("TOOK",), shrink=("NAME", "WHAT"), spare=("TOOK", "OWNER", "SUBMITTED", "PROJECT"))


def show(listing: Annotated[JsonListing, Key("job", is_list=False)], connection: Connection, job: options.JobId) -> None:
    """Show a job and its cells."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units
    from etfarm.client.jobs import summary

    async def fetch(farm: AsyncFarm) -> tuple[JobInfo, dict[str, str]]:
        handle = await farm.job(job)
        return handle.info, {device.id: device.name for device in await farm.devices()}

    info, devices = connection.call(fetch)
    listing.record(info)
    if listing.is_on_stdout:
        return
    labels = ", ".join(f"{key}={value}" for key, value in info.labels.items())
    now = datetime.now(UTC)
    pairs = [
        ("job", info.id),
        ("tags", ", ".join(info.tags)),
        ("name", info.name),
        ("labels", labels),
        ("project", info.project if info.project != "default" else ""),
        ("owner", info.owner),
        ("state", summary.describe_state(info)),
        ("submitted", units.ago(info.submitted_at, now)),
        ("took", summary.describe_duration(info)),
    ]
    output.show(output.facts((name, value) for name, value in pairs if value))
    measured = bool(summary.describe_measurements(info))
    rows = [
        (
            str(cell.index),
            cell.label,
            cell.state.value,
            *((cell.latency.removeprefix("p50 "),) if measured else ()),
            devices.get(cell.device or "") or (cell.device or "")[:12],
            str(cell.error or cell.waiting_for),
        )
        for cell in info.cells
    ]
    heads = ("CELL", "WHAT", "STATE", *(("P50",) if measured else ()), "DEVICE", "WHY")
    output.show_table(heads, rows, right=("CELL",), shrink=("WHAT", "WHY"))


def watch(
    outcome: Outcome,
    connection: Connection,
    jobs: Annotated[
        list[str] | None, typer.Argument(metavar="JOB", help="Ids, their first characters, tags, names, or latest.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="All live jobs of your projects, and those to come, until Ctrl-C.")] = False,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="With --all: only jobs of this principal.")] = "",
    json: options.JsonFile = None,
    verbose: options.Verbose = False,
) -> int:
    """Wait for a job and show its reports; for several or --all jobs, show their states. Ctrl-C leaves the jobs alone."""
    if all_ == bool(jobs):
        raise error_for("USAGE", "Give either jobs or --all.", "For example `etfarm jobs watch latest`.")
    if owner and not all_:
        raise error_for("USAGE", "--owner requires --all.", "Leave it out.")
    if jobs is not None and len(jobs) == 1:
        return _watch_one(outcome, jobs[0], json, verbose, connection)
    if json is not None or verbose:
        raise error_for(
            "USAGE", "--json and --verbose require exactly one job.", "Leave them out; `etfarm report export` writes reports."
        )
    if jobs:
        return run_async(lambda: watching.watch_jobs(jobs, connection, build_table=_live_table, describe=_progress))
    run_async(lambda: watching.watch_all_jobs(owner, connection, build_table=_live_table, describe=_progress))
    return 0


def _watch_one(outcome: Outcome, job: str, json: str | None, verbose: bool, connection: Connection) -> int:
    """Wait for a job and show its reports."""
    from etfarm.client.cli.terminal.display import open_display
    from etfarm.client.cli.views.results import print_result
    from etfarm.client.cli.workflows import job as flow
    from etfarm.client.models import JobState

    outcome.takes_verbose(verbose)
    outcome.goes_to(json)

    async def follow() -> int:
        with open_display() as display:
            async with connection.farm(display.status) as farm:
                handle = await farm.job(job)
                outcome.document = handle.document_without_reports
                try:
                    result = await flow.follow(handle, display, verbose=verbose, with_series=outcome.needs_series)
                except asyncio.CancelledError:
                    raise _left(handle) from None
                outcome.document = flow.ended(result)
                display.stop()
                print_result(result, to_stderr=json == STDOUT)
        return 0 if result.state is JobState.SUCCEEDED else 1

    return run_async(follow, outcome)


def _left(job: AsyncJob) -> Interrupted:
    """Return the error of Ctrl-C at a job that goes on."""
    remedy = f"`etfarm jobs watch {job.id}` shows it again, and `etfarm jobs cancel {job.id}` ends it."
    return Interrupted(f"Interrupted; job {job.id} continues.", remedy, job=job.id)


def cancel(connection: Connection, job: options.JobId) -> None:
    """End the live cells of a job."""

    async def end(farm: AsyncFarm) -> str:
        handle = await farm.job(job)
        before = handle.state
        if before.is_terminal:
            return f"Job {handle.id} was already done: {before.value}."
        after = await handle.cancel()
        return f"Job {handle.id}: {after.value}."

    tell(connection.call(end))


def retry(
    outcome: Outcome,
    connection: Connection,
    job: options.JobId,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the new job's id and exit.")] = False,
    json: options.JsonFile = None,
    verbose: options.Verbose = False,
) -> int:
    """Submit the failed cells of a job as a new job, labelled retry_of=JOB, wait for it and show its reports."""

    async def submit(farm: AsyncFarm) -> str:
        before = await farm.job(job)
        again = await before.retry()
        count = len(again.info.cells)
        tell(f"Job {again.id} runs {count} of {len(before.info.cells)} cells of job {before.id} again.", to_stderr=True)
        return again.id

    again = connection.call(submit)
    if detach:
        tell(again)
        return 0
    return _watch_one(outcome, again, json, verbose, connection)


def delete(
    connection: Connection,
    job: Annotated[list[str], typer.Argument(metavar="JOB", help="Ids, their first characters, tags, names, or latest.")],
    force: Annotated[bool, typer.Option("--force", help="Delete jobs that have tags, too, and the tags.")] = False,
) -> None:
    """Delete finished jobs with their logs and reports, which leave the history as well.

    `etfarm artifacts collect`, or the server's retention, then deletes the files that only they needed.
    """

    async def remove(farm: AsyncFarm) -> None:
        for each in job:
            tell(f"Deleted job {await farm.delete_job(each, force=force)}.")

    connection.call(remove)


def logs(
    connection: Connection,
    job: options.JobId,
    cell: Annotated[int | None, typer.Option("--cell", metavar="N", min=0, help="One cell's lines only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job is done.")] = False,
) -> None:
    """Show what the compilers and runners of a job printed: time in UTC, cell, source and text of each line."""

    async def tail(farm: AsyncFarm) -> None:
        handle = await farm.job(job)
        index = {known.id: str(known.index) for known in handle.info.cells}
        async for line in handle.logs(cell=cell, follow=follow):
            at = line.at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
            tell(f"{at} {index.get(line.cell_id, '-'):>3} {line.source.lower():<8} {line.text}", flush=follow)

    connection.call(tail)


def _live_table(console: Console, jobs: Sequence[JobInfo]) -> Table:
    """Return a row for each job."""
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units
    from etfarm.client.jobs import summary

    now = datetime.now(UTC)
    rows = [
        (
            job.id, job.name, summary.describe_contents(job), summary.describe_state(job), summary.describe_progress(job),
            summary.describe_measurements(job), job.owner,
            summary.describe_duration(job) or units.clock(max(0.0, (now - job.submitted_at).total_seconds())),
        )
        for job in jobs
    ]  # fmt: skip
    heads = ("JOB", "NAME", "WHAT", "STATE", "CELLS DONE", "P50", "OWNER", "TIME")
    return output.build_table(
        console, heads, rows, right=("CELLS DONE", "TIME"), shrink=("NAME", "WHAT"), spare=("OWNER", "CELLS DONE", "TIME")
    )


def _progress(job: JobInfo) -> str:
    """Return a job's state as one line."""
    from etfarm.client.jobs import summary

    name = f" {job.name}" if job.name else ""
    failed = [cell for cell in job.cells if cell.error is not None]
    why = f": {failed[0].label}: {failed[0].error}" if failed else ""
    parts = (
        f"{job.id}{name}: {summary.describe_state(job)}",
        f"{summary.describe_progress(job)} cells done",
        summary.describe_measurements(job),
    )
    return ", ".join(filter(None, parts)) + why
