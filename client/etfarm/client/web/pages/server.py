"""The server: its version, state and disk, who the visitor is, and its runner bundles; for admins, its settings and metrics."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.admin.server_report import describe_metrics, describe_server
from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError, Kind
from etfarm.client.models import ServerStatus
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of


async def server(request: Request) -> Response:
    """Show what the server says of itself."""
    client = await farm(request)
    info, bundles, projects, reported = await asyncio.gather(
        client.info(), client.bundles(), client.projects.list(), _status(client, is_admin=visitor_of(request).is_admin)
    )
    return render(
        request, "server.html", title="Server", command="etfarm server", info=info,
        facts=describe_server(info, client.address), bundles=bundles, projects=projects, reported=reported,
        measures=describe_metrics(reported.metrics) if reported else (),
    )  # fmt: skip


async def _status(client: AsyncFarm, *, is_admin: bool) -> ServerStatus | None:
    """Return the settings and metrics; None for visitors who may not see them, and of a server that does not tell them."""
    if not is_admin:
        return None
    try:
        return await client.server_status()
    except EtfarmError as error:
        if error.kind in (Kind.UNIMPLEMENTED, Kind.PERMISSION_DENIED):
            return None
        raise


ROUTES = (Route("/server", server, name="server", methods=["GET"]),)
