"""A job: its cells with their stages and progress, live; what they measured as a matrix and a Pareto plot; and its log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError
from etfarm.client.formats.phases import is_wait
from etfarm.client.jobs.job import AsyncJob
from etfarm.client.models import Cell, CellChanged, JobChanged, JobInfo, LogLine, Progress
from etfarm.client.web import cell_values
from etfarm.client.web.live import Topic
from etfarm.client.web.pareto import build_plot
from etfarm.client.web.templating import render, templates_of
from etfarm.client.web.visitors import farm, visitor_of

MAX_LOG_LINES: Final = 500
"""Number of the last lines of the log that the page shows."""
JOB_KEY: Final = "job"
PREFERRED: Final[Mapping[str, Sequence[str]]] = {
    "metric": ("latency", "tokens", "size"),
    "x": ("latency", "tokens", "size"),
    "y": ("accuracy", "size", "memory"),
}
"""Metrics of the shades and of both axes, where the address names none."""


@dataclass(frozen=True)
class JobPart:
    """The job's line of a live page."""

    job: JobInfo


@dataclass(frozen=True)
class CellPart:
    """A cell's row of a live page."""

    job_id: str
    cell: Cell
    device_name: str
    progress: Progress | None
    """What the cell does now; None if that is unknown, and after its end."""


async def job(request: Request) -> Response:
    """Show a job by its id; redirect from a tag, a name, `latest` and the beginning of an id."""
    handle = await (await farm(request)).job(request.path_params["job_id"])
    if handle.id != request.path_params["job_id"]:
        return RedirectResponse(templates_of(request).url_for("job", job_id=handle.id), status_code=303)
    shown, values = await asyncio.gather(_open(request, handle), _matrix(request, handle))
    parts = dict(shown.parts)
    return render(
        request, "job.html", title=handle.info.name or handle.id, command=f"etfarm jobs show {handle.id}", job=handle.info,
        job_part=parts.pop(JOB_KEY), cell_parts=list(parts.values()), shown=shown, max_log_lines=MAX_LOG_LINES, **values,
    )  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """What the page shows at first, with the positions from which it stays current; a job that has ended has none."""

    parts: Mapping[str, Any]
    log: Mapping[str, LogLine]
    position: str = ""
    log_position: str = ""


async def _open(request: Request, handle: AsyncJob) -> Shown:
    if handle.state.is_terminal:
        client = await farm(request)
        parts, log = await asyncio.gather(_parts(client, handle.info), _load_log(client, handle.id))
        return Shown(parts, log)
    feeds = visitor_of(request).account.feeds
    feed, log_feed = await asyncio.gather(feeds.open(JOB, handle.id), feeds.open(LOG, handle.id))
    return Shown(dict(feed.items), dict(log_feed.items), feed.position, log_feed.position)


async def matrix(request: Request) -> Response:
    """Return the part of the page that shows what the cells measured."""
    handle = await (await farm(request)).job(request.path_params["job_id"])
    part = render(request, "_job_matrix.html", job=handle.info, **await _matrix(request, handle))
    if request.headers.get("hx-trigger") == "measures":  # the visitor's choice, which the page's address keeps
        part.headers["hx-replace-url"] = templates_of(request).url_for("job", dict(request.query_params), job_id=handle.id)
    return part


async def log(request: Request) -> Response:
    """Send the whole log as text."""
    handle = await (await farm(request)).job(request.path_params["job_id"])
    numbers = {cell.id: cell.index for cell in handle.info.cells}

    async def lines() -> AsyncIterator[str]:
        async for line in handle.logs():
            yield f"{line.at:%Y-%m-%dT%H:%M:%S}Z {numbers.get(line.cell_id, '-'):>3} {line.source.lower():<8} {line.text}\n"

    return StreamingResponse(lines(), media_type="text/plain; charset=utf-8")


async def _matrix(request: Request, handle: AsyncJob) -> dict[str, Any]:
    """Return the values of _job_matrix.html."""
    client = await farm(request)
    info = handle.info
    values: dict[str, dict[str, float]] = {}
    if any(cell.state.is_terminal for cell in info.cells):
        document = await handle.document(with_series=False)
        values = {report["cell"]: cell_values.measured_values(report) for report in document["reports"]}
    names = await _device_names(client, info)
    known = [key for key in cell_values.METRICS if any(key in own for own in values.values())]
    query = request.query_params
    chosen = {name: _choice(query.get(name, ""), known, preferred) for name, preferred in PREFERRED.items()}
    matrices, plots = [], {}
    if known:
        matrices = cell_values.build_matrices(info.cells, values, names, cell_values.METRICS[chosen["metric"]])
        for shown in matrices:
            cells = [(cell.id, _label(cell, names), values.get(cell.id, {})) for cell in info.cells if cell.model == shown.model]
            plots[shown.model] = build_plot(cells, cell_values.METRICS[chosen["x"]], cell_values.METRICS[chosen["y"]])
    metrics = [cell_values.METRICS[key] for key in known]
    ended = sum(cell.state.is_terminal for cell in info.cells)
    return {"matrices": matrices, "metrics": metrics, "chosen": chosen, "plots": plots, "ended": ended}


def _choice(wanted: str, known: Sequence[str], preferred: Sequence[str]) -> str:
    """Return a known metric's key: the wanted one, else a preferred one, else any; empty if none is known."""
    return next((key for key in (wanted, *preferred, *known) if key in known), "")


def _label(cell: Cell, names: Mapping[str, str]) -> str:
    return " · ".join(filter(None, (*cell.traits[1:], names.get(cell.device or ""))))


async def _device_names(client: AsyncFarm, info: JobInfo) -> dict[str, str]:
    """Return names of the cells' devices by id; a device that the farm has forgotten has none."""
    wanted = {cell.device for cell in info.cells if cell.device}
    return {device.id: device.name for device in await client.devices() if device.id in wanted} if wanted else {}


async def _load(client: AsyncFarm, job_id: str) -> Mapping[str, JobPart | CellPart]:
    return await _parts(client, (await client.job(job_id)).info)


async def _parts(client: AsyncFarm, info: JobInfo) -> dict[str, JobPart | CellPart]:
    names = await _device_names(client, info)
    parts: dict[str, JobPart | CellPart] = {JOB_KEY: JobPart(info)}
    for cell in info.cells:
        parts[cell.id] = CellPart(info.id, cell, names.get(cell.device or "", ""), None)
    return parts


async def _watch(client: AsyncFarm, job_id: str) -> AsyncIterator[tuple[str, JobPart | CellPart | None]]:
    """Yield the job's parts as they change; after its end, nothing more."""
    handle = await client.job(job_id)
    info = handle.info
    names = await _device_names(client, info)
    current = {cell.id: CellPart(info.id, cell, names.get(cell.device or "", ""), None) for cell in info.cells}
    if not info.state.is_terminal:
        async for event in handle.watch():
            if isinstance(event, Progress) and event.cell_id in current:
                before = current[event.cell_id].progress
                current[event.cell_id] = replace(current[event.cell_id], progress=event)
                yield event.cell_id, current[event.cell_id]
                if is_wait(event.phase) or (before is not None and is_wait(before.phase)):
                    yield JOB_KEY, JobPart(handle.info)
            elif isinstance(event, CellChanged):
                current[event.cell.id] = await _changed(client, current[event.cell.id], event.cell, names)
                yield event.cell.id, current[event.cell.id]
                yield JOB_KEY, JobPart(handle.info)
            elif isinstance(event, JobChanged):
                yield JOB_KEY, JobPart(handle.info)
    for key, part in (await _parts(client, await handle.refresh())).items():
        yield key, part
    await asyncio.Event().wait()  # a feed that ended would make each page connect again


async def _changed(client: AsyncFarm, before: CellPart, cell: Cell, names: dict[str, str]) -> CellPart:
    """Return a cell's part after a change; the progress of an earlier state is outdated."""
    if cell.device and cell.device not in names:
        with suppress(EtfarmError):
            names[cell.device] = (await client.device(cell.device)).name
    progress = before.progress if cell.state is before.cell.state else None
    return CellPart(before.job_id, cell, names.get(cell.device or "", ""), progress)


def _is_same_phase(before: JobPart | CellPart, after: JobPart | CellPart) -> bool:
    """Return whether only the progress within a phase has changed."""
    if not (isinstance(before, CellPart) and isinstance(after, CellPart) and before.progress and after.progress):
        return False
    return before.cell == after.cell and before.progress.phase == after.progress.phase


async def _load_log(client: AsyncFarm, job_id: str) -> Mapping[str, LogLine]:
    last: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)
    async for line in (await client.job(job_id)).logs():
        last.append(line)
    return {str(line.number): line for line in last}


async def _watch_log(client: AsyncFarm, job_id: str) -> AsyncIterator[tuple[str, LogLine | None]]:
    handle = await client.job(job_id)
    after = max((int(number) for number in await _load_log(client, job_id)), default=0) - MAX_LOG_LINES
    # Also of a job that has ended: its last lines may have come after the feed was loaded.
    async for line in handle.logs(follow=True):
        if line.number > after:
            yield str(line.number), line
    await asyncio.Event().wait()


JOB: Final = Topic("job", "_job_part.html", _load, _watch, is_minor=_is_same_phase, max_items=20_000)
LOG: Final = Topic("log", "_log_line.html", _load_log, _watch_log, max_items=MAX_LOG_LINES)

TOPICS = (JOB, LOG)
ROUTES = (
    Route("/jobs/{job_id}", job, name="job", methods=["GET"]),
    Route("/jobs/{job_id}/matrix", matrix, name="job_matrix", methods=["GET"]),
    Route("/jobs/{job_id}/log.txt", log, name="job_log", methods=["GET"]),
)
