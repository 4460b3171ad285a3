"""The workflow of a command with a job: connect, submit, wait, finish."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from etfarm.client import reports
from etfarm.client.aio import AsyncFarm
from etfarm.client.cli.connection import Connection
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.display import Display, open_display
from etfarm.client.embedded.lease import Lease, is_lasting
from etfarm.client.errors import Interrupted
from etfarm.client.formats import units
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.transport import daemon_thread
from etfarm.wire import names, report
from etfarm.wire.errors import EtfarmError, error_for

if TYPE_CHECKING:
    from etfarm.client.reports import JobResult

Answer = TypeVar("Answer")

_FARM_LOST = "the farm is gone"

CANCEL_TIMEOUT_S = 20.0
"""Seconds that Ctrl-C waits for the job to be cancelled; a second Ctrl-C exits at once."""


LAST_LINES_S = 10.0
"""Seconds that the last lines of the log may take after the job is done."""

_NO_JOB: Final = "Interrupted; no job runs."


@dataclass(frozen=True)
class Task:
    """The job of one command."""

    submit: Callable[[AsyncFarm, Display], Awaitable[AsyncJob]]
    finish: Callable[[AsyncJob, JobResult, Display], Awaitable[None]]
    """Callback that downloads files and shows the result before the farm is left: leaving an embedded one takes a moment."""
    connection: Connection
    detach: bool = False
    exports: bool = False
    """Whether `submit` exports models, which needs torch."""
    compiles: bool = True
    """Whether the farm compiles models, for which an embedded one loads the compiler at once."""
    verbose: bool = False
    """Whether to show the lines that compilers and runners print, as they arrive."""
    retry: Callable[[AsyncFarm, AsyncJob, JobResult, Display], Awaitable[JobResult]] | None = None
    """Callback that measures cells again, and returns the result with their last reports."""


async def carry_out(task: Task, outcome: Outcome) -> tuple[AsyncJob, JobResult | None]:
    """Submit and watch the job; return it with its result, which is None if it was detached.

    Raises:
        EtfarmError: the job cannot be submitted or watched.
        Interrupted: Ctrl-C; the job was cancelled.
    """
    with open_display() as display:
        return await _carry_out(task, outcome, display)


async def _carry_out(task: Task, outcome: Outcome, display: Display) -> tuple[AsyncJob, JobResult | None]:
    farm = task.connection.farm(display.status, prewarm=task.compiles)
    if task.exports:
        # Importing torch takes seconds, and so may starting a farm: they run concurrently.
        daemon_thread.start(import_torch)
    try:
        try:
            await farm.__aenter__()
        except asyncio.CancelledError:
            raise Interrupted(_NO_JOB) from None
        if farm.lease is not None and task.detach and not farm.lease.lasting:
            raise _persistent_farm_needed()
        job = _with_farm(task, farm, outcome, display)
        return await _while_there(asyncio.create_task(job, name="job"), farm.lease)
    finally:
        await farm.close()


def import_torch() -> None:
    """Import torch for an export that follows."""
    with suppress(Exception):  # an export imports it again, and raises its errors
        importlib.import_module("torch.export")


async def require_persistent_farm(server: str | None) -> None:
    """Check, for `--detach`, that the command's farm continues after the command.

    Raises:
        NEEDS_LASTING_FARM: no server is set, and `etfarm up` keeps no embedded farm.
    """
    if not (server or os.environ.get(names.SERVER_VARIABLE)) and not await is_lasting():
        raise _persistent_farm_needed()


def _persistent_farm_needed() -> EtfarmError:
    """Return the error of `--detach` on a farm that ends with the command."""
    return error_for(
        "NEEDS_LASTING_FARM",
        "--detach needs a farm that stays: the embedded farm ends with this command, and the job with it.",
        "Run `etfarm up` in another terminal first, or name a server with --server or ETFARM_SERVER.",
    )


async def _while_there(working: asyncio.Task[Answer], lease: Lease | None) -> Answer:
    """Return the work's result while the farm runs.

    When cancelled, wait until the work has cleaned up, and raise its error.

    Raises:
        EmbeddedFarmFailed: the embedded farm ended; the work was cancelled.
    """
    lost = asyncio.create_task(lease.lost(), name="embedded farm") if lease is not None else None
    try:
        await asyncio.wait({working, lost} if lost else {working}, return_when=asyncio.FIRST_COMPLETED)
        if lost is not None and not working.done():
            working.cancel(_FARM_LOST)
            await asyncio.wait({working})
            lost.result()
    except asyncio.CancelledError:
        working.cancel()
        await asyncio.wait({working})
    finally:
        if lost is not None:
            lost.cancel()
    return working.result()


async def _with_farm(task: Task, farm: AsyncFarm, outcome: Outcome, display: Display) -> tuple[AsyncJob, JobResult | None]:
    if not task.exports:
        display.status("Submitting.")
    elif "torch.export" not in sys.modules:
        display.status("Importing torch.")
    # Output of a user's factory must not mix with what the command writes to stdout.
    with redirect_stdout(sys.stderr):
        try:
            job = await task.submit(farm, display)
        except asyncio.CancelledError as cancelled:
            if _FARM_LOST in cancelled.args:
                raise
            raise Interrupted(_NO_JOB) from None
    outcome.document = job.document_without_reports
    cells = job.info.cells
    display.status(f"Job {job.id}: {units.count(len(cells), 'cell')}.")
    if task.detach:
        return job, None
    if farm.lease is not None:
        farm.lease.hold_job(job.id)
    try:
        result = await follow(job, display, verbose=task.verbose, with_series=outcome.needs_series)
        outcome.document = ended(result)
        if task.retry is not None:
            result = await task.retry(farm, job, result, display)
            outcome.document = ended(result)
        outcome.failed_job = job.id if await _printed(job, result) else ""
        if any(report.runner is not None and report.runner.kind == "python" for report in result.reports):
            await _show_bundle_error(farm, display)
        await task.finish(job, result, display)
    except asyncio.CancelledError as cancelled:
        if _FARM_LOST in cancelled.args:
            raise
        raise await _cancel(job, outcome, display) from None
    finally:
        if farm.lease is not None and job.state.is_terminal:
            farm.lease.release_job(job.id)
    return job, result


async def _show_bundle_error(farm: AsyncFarm, display: Display) -> None:
    """Show why the farm has no runner bundle for its own architecture, if building one failed."""
    try:
        error = (await farm.info()).bundle_error
    except EtfarmError:
        return  # the farm is gone; the report's warning has the remedy
    if error is not None:
        display.log(f"warning: no native runner: {error}", "")


async def _printed(job: AsyncJob, result: JobResult) -> bool:
    """Return whether a job failed while something compiled or ran, so that printed lines may explain it."""
    if not any(report.error is not None and report.error.stage for report in result.reports):
        return False
    try:
        return await anext(job.logs(), None) is not None
    except EtfarmError:
        return False  # the farm is gone, and its log too


async def follow(job: AsyncJob, display: Display, *, verbose: bool = False, with_series: bool = True) -> JobResult:
    """Show the job's events until its state is final, and return its result.

    Args:
        verbose: also show the lines that compilers and runners print.
        with_series: as in `AsyncJob.document`.
    """
    display.cells(job.info.cells)
    log_task = asyncio.create_task(_show_log(job, display), name="job's log") if verbose else None
    try:
        async for event in job.watch():
            display.event(event)
        await job.refresh()
        if log_task is not None:
            await _finish_log(log_task, job, display)
    finally:
        if log_task is not None:
            log_task.cancel()
    return reports.JobResult.from_dict(await job.document(with_series=with_series))


async def _finish_log(log_task: asyncio.Task[None], job: AsyncJob, display: Display) -> None:
    """Wait for the log's last lines.

    A log that breaks off is reported, but does not affect the result.
    """
    more = f"`etfarm jobs logs {job.id}` shows all of it"
    try:
        async with asyncio.timeout(LAST_LINES_S):
            await log_task
    except TimeoutError:
        display.log(f"The log's last lines did not arrive in time; {more}.", "")
    except EtfarmError as error:
        display.log(f"The log ended early: {error} {more}.", "")


async def _show_log(job: AsyncJob, display: Display) -> None:
    labels = {cell.id: cell.label for cell in job.info.cells} if len(job.info.cells) > 1 else {}
    async for line in job.logs(follow=True):
        display.log(str(line), labels.get(line.cell_id, ""))


async def _cancel(job: AsyncJob, outcome: Outcome, display: Display) -> Interrupted:
    """Cancel the job of an interrupted command, and return the error that describes its end."""
    if job.state.is_terminal:
        return Interrupted(f"Interrupted; job {job.id} was done: `etfarm report show {job.id}`.", job=job.id)
    display.status(f"Cancelling job {job.id}. Press Ctrl-C again to exit at once.")

    async def cancel() -> None:
        await job.cancel()
        outcome.document = ended(reports.JobResult.from_dict(await job.document(with_series=outcome.needs_series)))

    try:
        await asyncio.wait_for(cancel(), CANCEL_TIMEOUT_S)  # asyncio.timeout raises no TimeoutError in a task that was cancelled
    except (EtfarmError, TimeoutError) as failed:
        why = failed if isinstance(failed, EtfarmError) else f"no answer from the server within {CANCEL_TIMEOUT_S:.0f} s."
        return Interrupted(
            f"Interrupted; the cancellation of job {job.id} may not have arrived, and the job may go on: {why}",
            f"Run `etfarm jobs cancel {job.id}` when the server answers again.",
            job=job.id,
        )
    return Interrupted(f"Interrupted; job {job.id} was cancelled.", job=job.id)


def ended(result: JobResult) -> Callable[[EtfarmError | None], dict[str, Any]]:
    """Return a document callback for `Outcome`, for a job with a final state."""
    return lambda error: {**result.json(), "error": report.error_json(error) if error is not None else None}
