"""The server: its version, state and disk, who the visitor is, its runner bundles, and the page's own sessions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etfarm.client.models import ServerInfo
from etfarm.client.web.templating import render
from etfarm.client.web.visitors import farm


async def server(request: Request) -> Response:
    """Show what the server says of itself."""
    client = await farm(request)
    info, bundles, projects = await asyncio.gather(client.info(), client.bundles(), client.projects.list())
    return render(
        request, "server.html", title="Server", command="etfarm doctor", info=info, facts=_facts(info, client.address),
        bundles=bundles, projects=projects, now_=datetime.now(UTC),
    )  # fmt: skip


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
