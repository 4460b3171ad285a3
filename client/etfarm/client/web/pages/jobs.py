"""The list of jobs: with conditions, by pages, and with states that stay current."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.models import JobInfo
from etfarm.client.web.job_filters import STATES, JobFilters
from etfarm.client.web.live import Topic
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of

PAGE_JOBS: Final = 50
MAX_LIVE_JOBS: Final = 2 * PAGE_JOBS
"""Maximum number of jobs whose rows change; the oldest leave the first page for new ones."""


async def jobs(request: Request) -> Response:
    """Show a page of the jobs that meet the conditions, newest first."""
    filters = JobFilters.from_query(request.query_params)
    token = request.query_params.get("page", "")[:500]
    conditions = filters.conditions(datetime.now(UTC))
    feed = await visitor_of(request).account.feeds.open(JOBS)
    position = feed.position
    page = await (await farm(request)).job_page(token, size=PAGE_JOBS, **conditions)
    return render(
        request, "jobs.html", title="Jobs", command=filters.command, jobs=page.jobs, next_page=page.next_page_token,
        filters=filters, states=STATES, is_first=not token, takes_new=not token and not filters.query, position=position,
    )  # fmt: skip


async def _load(client: AsyncFarm, argument: str) -> Mapping[str, JobInfo]:
    """Return the newest jobs, oldest first: those leave first."""
    return {job.id: job for job in reversed(await client.jobs(PAGE_JOBS))}


async def _watch(client: AsyncFarm, argument: str) -> AsyncIterator[tuple[str, JobInfo | None]]:
    async for job in client.watch_jobs():
        yield job.id, job


JOBS: Final = Topic("jobs", "_job_row.html", _load, _watch, max_items=MAX_LIVE_JOBS)

TOPICS = (JOBS,)
ROUTES = (Route("/jobs", jobs, name="jobs", methods=["GET"]),)
