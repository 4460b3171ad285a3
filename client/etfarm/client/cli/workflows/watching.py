"""Watching commands: all devices, several jobs or all jobs, as a live table or as lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from etfarm.client.cli.connection import Connection
from etfarm.client.cli.terminal.live_table import ChangeDisplay, open_live_table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from etfarm.client.jobs.job import AsyncJob
    from etfarm.client.models import Device, JobInfo

SHOWN_JOBS = 40
"""Maximum number of jobs in the table of all jobs: the live ones, and the last that ended."""


async def watch_devices(
    selector: str,
    connection: Connection,
    *,
    build_table: Callable[[Console, Sequence[Device]], Table],
    describe: Callable[[Device], str],
) -> None:
    """Show the devices that match a selector, and their changes, until interrupted."""
    devices: dict[str, Device] = {}

    def in_order() -> list[Device]:
        return sorted(devices.values(), key=lambda device: (device.name, device.id))

    with open_live_table(lambda console: build_table(console, in_order())) as display:
        async with connection.farm() as farm:
            async for change in farm.watch_devices(selector):
                if change.device is not None:
                    devices[change.device_id] = change.device
                    display.changed(describe(change.device))
                elif (former := devices.pop(change.device_id, None)) is not None:
                    display.changed(f"{former.name} ({former.id[:12]}): gone")


async def watch_all_jobs(
    owner: str,
    connection: Connection,
    *,
    build_table: Callable[[Console, Sequence[JobInfo]], Table],
    describe: Callable[[JobInfo], str],
) -> None:
    """Show all live jobs, and those to come, until interrupted."""
    jobs: dict[str, JobInfo] = {}
    with open_live_table(lambda console: build_table(console, list(jobs.values()))) as display:
        async with connection.farm() as farm:
            lines: dict[str, str] = {}
            async for job in farm.watch_jobs(owner):
                jobs[job.id] = job
                for job_id in _surplus(jobs):
                    del jobs[job_id]
                    lines.pop(job_id, None)
                _show(display, lines, job, describe)


async def watch_jobs(
    keys: Sequence[str],
    connection: Connection,
    *,
    build_table: Callable[[Console, Sequence[JobInfo]], Table],
    describe: Callable[[JobInfo], str],
) -> int:
    """Show the states of jobs until all have ended; return the exit code."""
    from etfarm.client.models import JobState

    async with connection.farm() as farm:
        watched: dict[str, AsyncJob] = {}
        for key in keys:
            job = await farm.job(key)
            watched[job.id] = job
        lines: dict[str, str] = {}

        async def follow(job: AsyncJob, display: ChangeDisplay) -> None:
            _show(display, lines, job.info, describe)
            if not job.state.is_terminal:
                async for event in job.watch():
                    if event.sequence is not None:
                        _show(display, lines, job.info, describe)
                await job.refresh()

        with open_live_table(lambda console: build_table(console, [job.info for job in watched.values()])) as display:
            try:
                async with asyncio.TaskGroup() as group:
                    for job in watched.values():
                        group.create_task(follow(job, display), name=f"watch {job.id}")
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
    return 0 if all(job.state is JobState.SUCCEEDED for job in watched.values()) else 1


def _show(display: ChangeDisplay, lines: dict[str, str], job: JobInfo, describe: Callable[[JobInfo], str]) -> None:
    """Show a job unless its line is the one that was shown last."""
    line = describe(job)
    if lines.get(job.id) != line:
        lines[job.id] = line
        display.changed(line)


def _surplus(jobs: dict[str, JobInfo]) -> list[str]:
    """Return the ids of the jobs that leave the table: those that ended first, beyond its size."""
    ended = [job.id for job in jobs.values() if job.state.is_terminal]
    return ended[: max(0, len(jobs) - SHOWN_JOBS)]
