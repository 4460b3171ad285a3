"""Search over devices, jobs and models."""

from __future__ import annotations

import asyncio
import shlex
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.models import Device, JobInfo
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of

MAX_RESULTS: Final = 20
"""Number of results of each kind."""
MIN_ID_CHARACTERS: Final = 4


async def search(request: Request) -> Response:
    """Show devices, jobs and models whose name or id has the text `q`."""
    text = request.query_params.get("q", "").strip()[:200]
    client = await farm(request)
    devices: list[Device] = []
    jobs: list[JobInfo] = []
    models: list[str] = []
    if text:
        known, jobs = await asyncio.gather(client.devices(), _jobs(client, text))
        devices = [device for device in known if _matches(device, text.lower())][:MAX_RESULTS]
        models = sorted({cell.model for job in jobs for cell in job.cells if text.lower() in cell.model.lower()})[:MAX_RESULTS]
    return render(
        request, "search.html", title="Search", command=f"etfarm jobs list --name {shlex.quote(text)}" if text else "", text=text,
        devices=devices, jobs=jobs, models=models, may_change=visitor_of(request).may_change,
    )  # fmt: skip


def _matches(device: Device, text: str) -> bool:
    return text in device.name.lower() or device.id.startswith(text) or text in device.soc.lower() or text in device.model.lower()


async def _jobs(client: AsyncFarm, text: str) -> list[JobInfo]:
    """Return the newest jobs whose name, model, tag or id has the text, each once."""
    by_name, by_model, recent = await asyncio.gather(
        client.jobs(MAX_RESULTS, name=text), client.jobs(MAX_RESULTS, model=text), client.jobs(500)
    )
    wanted = text.lower()
    others = [
        job
        for job in recent
        if (len(text) >= MIN_ID_CHARACTERS and job.id.startswith(wanted))
        or any(wanted in tag.lower() for tag in job.tags)
        or any(wanted in cell.model.lower() for cell in job.cells)
    ]
    results = {job.id: job for job in (*others, *by_name, *by_model)}
    return sorted(results.values(), key=lambda job: job.submitted_at, reverse=True)[:MAX_RESULTS]


ROUTES = (Route("/search", search, name="search", methods=["GET"]),)
