"""The server: its version, state and disk, who the visitor is, and its runner bundles; for admins, its settings and metrics."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.aio import AsyncFarm
from etfarm.client.errors import EtfarmError, Kind
from etfarm.client.models import ServerInfo, ServerStatus
from etfarm.client.web.server_values import describe_metrics
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm, visitor_of

CALLS: Final = ("etfarm_rpcs", "etfarm_rpc_seconds", "etfarm_rpcs_open")
"""Metrics with a value for each call of the contract, which are many."""


async def server(request: Request) -> Response:
    """Show what the server says of itself."""
    client = await farm(request)
    info, bundles, projects, reported = await asyncio.gather(
        client.info(), client.bundles(), client.projects.list(), _status(client, is_admin=visitor_of(request).is_admin)
    )
    return render(
        request, "server.html", title="Server", command="etfarm doctor", info=info, facts=_facts(info, client.address),
        bundles=bundles, projects=projects, reported=reported, calls=CALLS,
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


def _facts(info: ServerInfo, address: str) -> list[tuple[str, str]]:
    """Return the server's facts as names and values, without missing ones."""

    def instant(time: datetime | None) -> str:
        return f"{time:%Y-%m-%d %H:%M} UTC" if time is not None else ""

    facts = (
        ("Version", f"etfarm {info.version}, contract {info.protocol_version}"),
        ("Address", address),
        ("You are", f"{info.principal}, {info.role.lower()}" if info.principal else info.role.lower()),
        ("Your token ends", instant(info.token_expires_at)),
        ("The certificate ends", instant(info.certificate_expires_at)),
        ("Clock", instant(info.server_time)),
    )
    return [(name, value) for name, value in facts if value]


ROUTES = (Route("/server", server, name="server", methods=["GET"]),)
