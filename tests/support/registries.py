"""A registry of devices on a database, with a clock that the test turns."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from etfarm.server.artifacts.store import Store
from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.server.state.engine import Database
from etfarm.v1.agent_pb2 import Hello
from etfarm.v1.device_pb2 import Device

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def board(name: str, **more: Any) -> Device:
    """Return a device as its agent describes it."""
    return Device(**{"id": name, "name": f"board-{name}", "arch": "aarch64", **more})


class RegistryWorld:
    """A registry, and what a restarted server would know."""

    at = NOON

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self.database = database
        self.runs = Runs(3600)
        self.store = Store(folder, database)
        self.bundles = Bundles(self.store, database, folder)
        self.registry = self.new_registry()

    def new_registry(self) -> Registry:
        """Return a registry as a server has it before it has read the database."""
        return Registry(self.database, self.bundles, self.runs, self.now)

    async def restart(self) -> Registry:
        """Go on with the registry of a server that has just started."""
        self.registry = self.new_registry()
        await self.registry.load()
        return self.registry

    def now(self) -> datetime:
        return self.at

    def later(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)

    def session(self, agent: str = "agent", boot: str = "", **more: Any) -> AgentSession:
        return AgentSession(agent, boot, lambda: self.at.timestamp(), **more)

    async def connect(
        self, *devices: str | Device, agent: str = "agent", boot: str = "", principal: str = "", **hello: Any
    ) -> AgentSession:
        """Connect an agent with devices, which are boards where they are only named."""
        session = self.session(agent, boot, principal=principal)
        described = [each if isinstance(each, Device) else board(each) for each in devices]
        await self.registry.connect(session, Hello(agent_id=agent, devices=described, **hello))
        return session
