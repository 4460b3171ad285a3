"""The devices of the farm, live, and a device's own page: its facts, health, runs and telemetry."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etfarm.client.models import Device, DeviceState, JobInfo
from etfarm.client.web import device_rows
from etfarm.client.web.device_facts import facts, health_events
from etfarm.client.web.live import Topic
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of

MAX_RECENT_JOBS: Final = 200
"""Number of the newest jobs that a device's runs are looked for in."""
MAX_RUNS: Final = 50
FIRST_ROWS: Final = 60
"""Number of rows in the page's first picture, more than a screen has; the rest follows within some frames."""
STATES: Final = tuple(state.value.lower() for state in DeviceState)
RANGES: Final[Mapping[str, timedelta]] = {"2h": timedelta(hours=2), "24h": timedelta(days=1), "7d": timedelta(days=7)}
"""Times of the telemetry charts by name."""


async def devices(request: Request) -> Response:
    """Show all devices that match the selector."""
    selector = request.query_params.get("selector", "")
    wanted = request.query_params.get("state", "")
    feed = await visitor_of(request).account.feeds.open(DEVICES)
    if selector:
        matching = {device.id for device in await (await farm(request)).devices(selector)}
    rows = feed.rows([key for key in feed.items if not selector or key in matching])
    command = f"etfarm devices list{f' --device {shlex.quote(selector)}' if selector else ''}"
    return render(
        request, "devices.html", title="Devices", command=command, rows=rows, first_rows=FIRST_ROWS, items=feed.items,
        position=feed.position, selector=selector, state=wanted if wanted in STATES else "", states=STATES,
    )  # fmt: skip


async def device(request: Request) -> Response:
    """Show everything about one device."""
    client = await farm(request)
    known = await client.device(request.path_params["device_id"])
    events, jobs, feed = await asyncio.gather(
        client.device_health(known.id, limit=50),
        client.jobs(MAX_RECENT_JOBS),
        visitor_of(request).account.feeds.open(DEVICE, known.id),
    )
    return render(
        request, "device.html", title=known.name, command=f"etfarm devices show {shlex.quote(known.name)}", device=known,
        facts=facts(known, datetime.now(UTC)), events=health_events(events), runs=_runs_of(known, jobs), feed=feed, ranges=RANGES,
    )  # fmt: skip


async def telemetry(request: Request) -> Response:
    """Return a device's stored readings as columns for its charts: times in seconds, then each kind of reading."""
    span = RANGES.get(request.query_params.get("range", "2h"), RANGES["2h"])
    client = await farm(request)
    readings = await client.device_telemetry(request.path_params["device_id"], since=datetime.now(UTC) - span)
    keys = sorted({key for reading in readings for key in reading.values})
    columns = {key: [_number(reading.values.get(key)) for reading in readings] for key in keys}
    return JSONResponse({"times_s": [reading.at.timestamp() for reading in readings], "values": columns})


def _number(value: float | bool | None) -> float | int | None:
    return int(value) if isinstance(value, bool) else value


def _runs_of(device: Device, jobs: list[JobInfo]) -> list[dict[str, Any]]:
    """Return the cells of the newest jobs that ran on a device, newest first."""
    runs = [{"job": job, "cell": cell} for job in jobs for cell in job.cells if cell.device == device.id]
    return runs[:MAX_RUNS]


DEVICES: Final = Topic(
    "devices",
    "_device_row.html",
    device_rows.load,
    device_rows.watch,
    summary="_devices_summary.html",
    is_minor=device_rows.is_only_telemetry,
    max_items=10_000,
)
DEVICE: Final = Topic("device", "_device_state.html", device_rows.load, device_rows.watch, is_minor=device_rows.is_only_telemetry)

TOPICS = (DEVICES, DEVICE)
ROUTES = (
    Route("/", devices, name="home", methods=["GET"]),
    Route("/devices", devices, name="devices", methods=["GET"]),
    Route("/devices/{device_id}", device, name="device", methods=["GET"]),
    Route("/devices/{device_id}/telemetry.json", telemetry, name="device_telemetry", methods=["GET"]),
)
