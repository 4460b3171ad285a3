"""The client's check of `etfarm doctor`: the configured server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Final

from etfarm.client.aio import AsyncFarm
from etfarm.client.models import ServerInfo
from etfarm.wire.doctor import Check, Finding, Status
from etfarm.wire.errors import EtfarmError
from etfarm.wire.names import SERVER_VARIABLE


def check_server() -> Iterable[Finding]:
    """Yield whether the server of ETFARM_SERVER answers, as whom it sees the caller, and whether its version is this one."""
    address = os.environ.get(SERVER_VARIABLE)
    if not address:
        yield Finding("server", Status.OK, f"{SERVER_VARIABLE} is not set: commands start a farm of their own.")
        return
    try:
        info = asyncio.run(_fetch(address))
    except EtfarmError as error:
        yield Finding("server", Status.MISSING, error.message, "no command that uses the farm works.", error.remedy)
        return
    caller = f"{info.principal or 'anonymous'}, {info.role.lower()}"
    yield Finding(
        "server", Status.OK, f"{address}, etfarm {info.version}, you are {caller}; {info.devices_online} devices online"
    )
    if info.version != version("etfarm"):
        text = f"The server has etfarm {info.version}, this machine {version('etfarm')}."
        yield Finding("server version", Status.WARNING, text, "newer features may be refused.", "Install the server's version.")
    if info.bundle_error is not None:
        cost = "devices of the server's architecture use ExecuTorch's Python binding, or nothing."
        yield Finding("server's runner", Status.WARNING, info.bundle_error.message, cost, info.bundle_error.remedy)


async def _fetch(address: str) -> ServerInfo:
    async with AsyncFarm(address) as farm:
        return await farm.info()


CHECKS: Final[Mapping[str, Check]] = {"server": check_server}
