"""Comparisons of two or more jobs or reports, each with the first one."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError
from etfarm.client.jobs.report_file import is_named
from etfarm.client.models import CellState, JobInfo
from etfarm.client.web.compare_values import Pair, Scale, describe_pairs, fit_scale
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm
from etfarm.wire import comparison
from etfarm.wire.errors import error_for

MAX_REPORTS: Final = 6
MAX_RECENT_JOBS: Final = 50
"""Number of the newest jobs that the form suggests."""


@dataclass(frozen=True)
class Choice:
    """A job that can be chosen for a comparison."""

    job: JobInfo
    names: list[str]
    """What is compared then, the base first."""


@dataclass(frozen=True)
class Side:
    """A candidate beside the base."""

    name: str
    document: dict[str, Any] | None
    """etfarm.comparison/1; None if the comparison failed."""
    pairs: tuple[Pair, ...]
    error: EtfarmError | None


async def compare(request: Request) -> Response:
    """Compare the first report in `report` with each of the others; of a single one, or of `candidate`, ask for the other."""
    query = request.query_params
    names = [name.strip()[:300] for name in query.getlist("report") if name.strip()]
    candidate = "" if names else query.get("candidate", "").strip()[:300]
    _require_jobs([*names, *([candidate] if candidate else ())])
    client = await farm(request)
    sides: list[Side] = []
    choices: list[Choice] = []
    scale, chosen = Scale(1.0), None
    recent = await client.jobs(MAX_RECENT_JOBS)
    if len(names) > 1:
        sides = list(await asyncio.gather(*(_compare(client, names[0], name) for name in names[1:])))
        scale = fit_scale([pair for side in sides for pair in side.pairs])
    else:
        known = candidate or "".join(names)
        chosen = (await client.job(comparison.split_choice(known)[0])).info if known else None
        jobs = _comparable(recent, chosen)
        choices = [Choice(job, [job.id, candidate] if candidate else [*names, job.id]) for job in jobs]
    return render(
        request, "compare.html", title="Compare", command=_command(names, candidate),
        names=names or (["", candidate] if candidate else []), candidate=candidate, chosen=chosen, choices=choices,
        sides=sides, scale=scale, recent=recent, max_reports=MAX_REPORTS, label=comparison.label,
        job_of=lambda name: comparison.split_choice(name)[0], title_of=lambda name: _title(recent, name),
    )  # fmt: skip


def _title(recent: Sequence[JobInfo], name: str) -> str:
    """Return what a person calls a side of the comparison: the job's name with the choice of its reports, if it has one."""
    job_id, choice = comparison.split_choice(name)
    job = next((job for job in recent if job.id == job_id), None)
    return name if job is None or not job.name else f"{job.name}{name[len(job_id) :] if choice else ''}"


def _command(names: list[str], candidate: str) -> str:
    """Return the commands that compare the same; words in capitals stand for what is still to be chosen."""
    base = shlex.quote(names[0]) if names else "BASE"
    others = [shlex.quote(name) for name in (*names[1:], candidate) if name] or ["CANDIDATE"]
    return "; ".join(f"etfarm compare {base} {other}" for other in others)


def _comparable(recent: Sequence[JobInfo], chosen: JobInfo | None) -> list[JobInfo]:
    """Return the jobs that have a report; beside a chosen one, those that measured one of its models, without itself."""
    models = {cell.model for cell in chosen.cells} if chosen is not None else set()
    return [
        job
        for job in recent
        if any(cell.state is CellState.SUCCEEDED and (chosen is None or cell.model in models) for cell in job.cells)
        and (chosen is None or job.id != chosen.id)
    ]


def _require_jobs(names: list[str]) -> None:
    """Refuse names of files, which would be read from the disk of the page's server, and too many names.

    Raises:
        BAD_OPTION: a name is a file's, or there are more than `MAX_REPORTS`.
    """
    for name in names:
        if is_named(comparison.split_choice(name)[0]):
            remedy = "Give a job's id, tag or name, or compare files with `etfarm compare`."
            raise error_for("BAD_OPTION", f"`report` must be a job, got {name!r}.", remedy, option="report")
    if len(names) > MAX_REPORTS:
        raise error_for(
            "BAD_OPTION", f"`report` must occur 1 to {MAX_REPORTS} times, got {len(names)}.", "Leave some out.", option="report"
        )


async def _compare(client: AsyncFarm, base: str, candidate: str) -> Side:
    """Return a comparison; one that fails does not hide the others."""
    try:
        document = (await client.compare(base, candidate)).json()
    except EtfarmError as error:
        return Side(candidate, None, (), error)
    return Side(candidate, document, tuple(await asyncio.to_thread(describe_pairs, document)), None)


ROUTES = (Route("/compare", compare, name="compare", methods=["GET"]),)
