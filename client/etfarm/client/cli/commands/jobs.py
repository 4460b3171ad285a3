"""`etfarm jobs`: submitted jobs and their progress."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from etfarm.client.cli import options
from etfarm.client.cli.app import Command, execute
from etfarm.client.cli.event_loop import run_async
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.outcome import STDOUT, Outcome
from etfarm.client.cli.terminal.capabilities import tell
from etfarm.client.cli.usage import Usage

if TYPE_CHECKING:
    from etfarm.client.models import JobInfo


def main(argv: list[str]) -> int:
    """Run `etfarm jobs`."""
    commands: dict[str, Command] = {
        "list": list_, "show": show, "watch": watch, "cancel": cancel, "retry": retry, "logs": logs
    }  # fmt: skip
    return execute(commands, argv, "jobs", "Lists, shows, watches, cancels and retries jobs, and reads their logs.")


def list_(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Only jobs with this text in their name.")] = "",
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="K=V", help="Only jobs with this label; repeatable.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only jobs in this state, such as FAILED; repeatable."),
    ] = None,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Only jobs that this principal submitted.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Number of jobs, newest first.")] = 20,
    json: options.ListJson = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """List the jobs of the farm, newest first."""
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units
    from etfarm.client.models import JobState

    listing = JsonListing(context.obj, json, "jobs")
    labels = options.labels_of(label or ())
    states = [text.upper() for text in state or ()]
    for wanted in states:
        if wanted not in JobState.__members__:
            known = ", ".join(JobState.__members__)
            raise Usage(f"Values of --state must be job states, got {wanted!r}.", f"Use {known}.")

    async def fetch() -> list[JobInfo]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            return await farm.jobs(limit, name=name, labels=labels, states=states, owner=owner)

    jobs = listing.record(run_async(fetch))
    if listing.is_on_stdout:
        return
    if not jobs:
        print("No job matches." if name or labels or states or owner else "There are no jobs.")
        return
    tagged = any(job.tags for job in jobs)
    several = len({job.project for job in jobs}) > 1
    measured = any(_medians(job) for job in jobs)
    now = datetime.now(UTC)
    rows = [
        (
            job.id,
            *((", ".join(job.tags),) if tagged else ()),
            job.name,
            _what(job),
            job.state.value,
            *((_fastest_to_slowest(job),) if measured else ()),
            *((job.project,) if several else ()),
            job.owner,
            units.ago(job.submitted_at, now),
            _took(job),
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
    output.show_table(heads, rows, right=("TOOK",), shrink=("NAME", "WHAT"))


def show(
    context: typer.Context,
    job: options.JobId,
    json: options.ListJson = None,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """One job and its cells."""
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal import output
    from etfarm.client.formats import units

    listing = JsonListing(context.obj, json, "job", is_list=False)

    async def fetch() -> tuple[JobInfo, dict[str, str]]:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            handle = await farm.job(job)
            return handle.info, {device.id: device.name for device in await farm.devices()}

    info, devices = run_async(fetch)
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
        ("state", info.state.value),
        ("submitted", units.ago(info.submitted_at, now)),
        ("took", _took(info)),
    ]
    output.show(output.facts((name, value) for name, value in pairs if value))
    measured = bool(_medians(info))
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
    context: typer.Context,
    job: options.JobId,
    json: options.JsonFile = None,
    verbose: options.Verbose = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> int:
    """Wait for a job and show its reports. Ctrl-C leaves the job alone: `etfarm jobs cancel` ends it."""
    from etfarm.client.aio import AsyncFarm
    from etfarm.client.cli.terminal.display import open_display
    from etfarm.client.cli.views.results import print_result
    from etfarm.client.cli.workflows import job as flow
    from etfarm.client.models import JobState

    outcome: Outcome = context.obj
    outcome.takes_verbose(verbose)
    outcome.goes_to(json)

    async def follow() -> int:
        with open_display() as display:
            async with AsyncFarm(server, tls_ca=tls_ca, on_status=display.status) as farm:
                handle = await farm.job(job)
                outcome.document = handle.document_without_reports
                result = await flow.follow(handle, display, verbose=verbose, with_series=outcome.needs_series)
                outcome.document = flow.ended(result)
                display.stop()
                print_result(result, to_stderr=json == STDOUT)
        return 0 if result.state is JobState.SUCCEEDED else 1

    return run_async(follow, outcome)


def cancel(
    job: options.JobId, server: options.Server = None, tls_ca: options.TlsCa = None, project: options.Project = None
) -> None:
    """End the live cells of a job."""
    from etfarm.client.aio import AsyncFarm

    async def end() -> str:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            handle = await farm.job(job)
            before = handle.state
            if before.is_terminal:
                return f"Job {handle.id} was already done: {before.value}."
            after = await handle.cancel()
            return f"Job {handle.id}: {after.value}."

    tell(run_async(end))


def retry(
    context: typer.Context,
    job: options.JobId,
    detach: Annotated[bool, typer.Option("--detach", help="Submit, print the new job's id and exit.")] = False,
    json: options.JsonFile = None,
    verbose: options.Verbose = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> int:
    """Submit the failed cells of a job as a new job, labelled retry_of=JOB, wait for it and show its reports."""
    from etfarm.client.aio import AsyncFarm

    async def submit() -> str:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            before = await farm.job(job)
            again = await before.retry()
            count = len(again.info.cells)
            tell(f"Job {again.id} runs {count} of {len(before.info.cells)} cells of job {before.id} again.", to_stderr=True)
            return again.id

    again = run_async(submit)
    if detach:
        tell(again)
        return 0
    return watch(context, again, json, verbose, server, tls_ca, project)


def logs(
    job: options.JobId,
    cell: Annotated[int | None, typer.Option("--cell", metavar="N", min=0, help="One cell's lines only.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the job is done.")] = False,
    server: options.Server = None,
    tls_ca: options.TlsCa = None,
    project: options.Project = None,
) -> None:
    """Show what the compilers and runners of a job printed: time in UTC, cell, source and text of each line."""
    from etfarm.client.aio import AsyncFarm

    async def tail() -> None:
        async with AsyncFarm(server, tls_ca=tls_ca) as farm:
            handle = await farm.job(job)
            index = {known.id: str(known.index) for known in handle.info.cells}
            async for line in handle.logs(cell=cell, follow=follow):
                at = line.at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
                tell(f"{at} {index.get(line.cell_id, '-'):>3} {line.source.lower():<8} {line.text}", flush=follow)

    run_async(tail)


def _what(job: JobInfo) -> str:
    """Return models and recipes of a job, each once: `resnet8, ds_cnn · xnnpack_fp32`."""
    models = dict.fromkeys(cell.model for cell in job.cells)
    recipes = dict.fromkeys(cell.recipe for cell in job.cells if cell.recipe)
    return " · ".join(filter(None, (", ".join(models), ", ".join(recipes))))


def _medians(job: JobInfo) -> list[float]:
    """Return the measured medians of a job's cells, in nanoseconds."""
    return [cell.p50_ns for cell in job.cells if cell.p50_ns is not None]


def _fastest_to_slowest(job: JobInfo) -> str:
    """Return the job's median, or the least and the largest one of its cells; empty without a measurement."""
    from etfarm.client.formats import units

    medians = _medians(job)
    if not medians:
        return ""
    least, most = units.time(min(medians)), units.time(max(medians))
    return least if least == most else f"{least} to {most}"


def _took(job: JobInfo) -> str:
    from etfarm.client.formats import units

    return units.clock((job.finished_at - job.submitted_at).total_seconds()) if job.finished_at else ""
