"""The history of a model: its latency over time, with what changed and where it became faster or slower."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from typing import Final

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.jobs.history import trends
from etfarm.client.web.form_fields import is_thread_count
from etfarm.client.web.history_values import commit_of, describe_trends
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm
from etfarm.wire.errors import error_for

MAX_REPORTS: Final = 500
MAX_RECENT_JOBS: Final = 500
"""Number of the newest jobs whose models the page offers, and whose labels it knows."""
FILTERS: Final = ("device", "recipe", "method")


async def history(request: Request) -> Response:
    """Show the series of the model in `model`; without one, the models of the newest jobs."""
    query = request.query_params
    model = query.get("model", "").strip()[:300]
    filters = {key: query.get(key, "").strip()[:400] for key in FILTERS}
    threads = _threads(query)
    client = await farm(request)
    if not model:
        models = sorted({cell.model for job in await client.jobs(MAX_RECENT_JOBS) for cell in job.cells if cell.model})
        return render(
            request, "history.html", title="History", command=_command("MODEL", filters, threads), model="", models=models,
            trends=[], filters=filters, threads=threads, has_commits=False, by="time", is_cut=False,
        )  # fmt: skip
    entries, jobs = await asyncio.gather(
        client.history(model, threads=threads, limit=MAX_REPORTS, **filters), client.jobs(MAX_RECENT_JOBS, model=model)
    )
    labels = {job.id: job.labels for job in jobs}
    names = {job.id: job.name for job in jobs}
    shown = await asyncio.to_thread(lambda: describe_trends(trends(entries), labels, names))
    has_commits = any(commit_of(labels.get(entry.job, {})) for entry in entries)
    by = query.get("by", "commit" if has_commits else "time")
    return render(
        request, "history.html", title=f"History of {model}", command=_command(model, filters, threads), model=model, models=[],
        trends=shown, filters=filters, threads=threads, has_commits=has_commits, by="commit" if by == "commit" else "time",
        is_cut=len(entries) >= MAX_REPORTS,
    )  # fmt: skip


def _threads(query: QueryParams) -> int | None:
    text = query.get("threads", "").strip()
    if not text:
        return None
    if not (is_thread_count(text)):
        raise error_for(
            "BAD_OPTION", f"`threads` must be a number of threads, got {text[:40]!r}.", "Write for example 4.", option="threads"
        )
    return int(text)


def _command(model: str, filters: Mapping[str, str], threads: int | None) -> str:
    options = [f"--{key} {shlex.quote(value)}" for key, value in filters.items() if value]
    options += [f"--threads {threads}"] if threads else []
    return " ".join(["etfarm history", shlex.quote(model), *options])


ROUTES = (Route("/history", history, name="history", methods=["GET"]),)
