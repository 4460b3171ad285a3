"""Upgrades of agents: one agent at a time is drained, sent a wheel, and awaited with its new version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog

from etfarm.server.devices.errors import agent_offline
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runs import Runs
from etfarm.server.devices.session import AgentSession
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.v1.agent_pb2 import UpgradePhase
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.status import from_proto

log = structlog.get_logger()

INSTALL_S: Final = 900.0
"""How long an agent may take to download and install a wheel."""
FALL_BACK_S: Final = 60.0
"""How long the former version may take to connect, after the time limit of the new one."""

_REASON: Final = "upgrade of its agent to etfarm "
"""Beginning of the reason with which an upgrade drains devices."""

_MAX_NEWS: Final = 100
"""Maximum number of unread reports of one upgrade."""


@dataclass
class _Upgrade:
    """One upgrade that is going on."""

    id: str
    wheel: str
    """Digest of the wheel."""
    principal: str
    """The owner of the agent's token."""
    news: asyncio.Queue[agent_pb2.UpgradeProgress | agent_pb2.Hello] = field(default_factory=asyncio.Queue)


class Upgrades:
    """The upgrades of agents.

    Args:
        new_id: returns a unique id.
    """

    def __init__(self, registry: Registry, runs: Runs, new_id: Callable[[], str]) -> None:
        self._registry = registry
        self._runs = runs
        self._new_id = new_id
        self._running: dict[str, _Upgrade] = {}
        """By agent id."""
        self._changed = asyncio.Event()
        registry.on_change(self._changed.set)

    async def release(self) -> None:
        """Undrain the devices whose upgrade an earlier server did not finish."""
        for device in self._registry.devices():
            if device.drain.reason.startswith(_REASON):
                await self._registry.undrain(device.id)

    def connected(self, hello: agent_pb2.Hello) -> None:
        """Record that an agent has connected."""
        upgrade = self._running.get(hello.agent_id)
        if upgrade is not None and upgrade.news.qsize() < _MAX_NEWS:
            upgrade.news.put_nowait(hello)

    def progressed(self, session: AgentSession, progress: agent_pb2.UpgradeProgress) -> None:
        """Record what an agent reports of its upgrade."""
        upgrade = self._running.get(session.agent_id)
        if upgrade is not None and upgrade.id == progress.upgrade_id and upgrade.news.qsize() < _MAX_NEWS:
            upgrade.news.put_nowait(progress)

    def wheels(self) -> set[str]:
        """Return the digests of the wheels of upgrades that are going on, which must stay stored until these end."""
        return {upgrade.wheel for upgrade in self._running.values()}

    def offers(self, principal: str, digest: str) -> bool:
        """Return whether an agent of a principal is being upgraded to a wheel, and therefore may read it."""
        return any((upgrade.principal, upgrade.wheel) == (principal, digest) for upgrade in self._running.values())

    async def upgrade(
        self, agent_id: str, wheel: common_pb2.Artifact, version: str, *, drain_s: float, limit_s: float, principal: str
    ) -> AsyncGenerator[agent_pb2.UpgradeAgentProgress, None]:
        """Upgrade an agent, and yield each phase as it begins.

        The devices take runs again however this ends; those that were drained before stay drained.

        Args:
            wheel: the stored wheel.
            version: its version.
            drain_s: how long the devices' runs may take.
            limit_s: how long the new version may take to connect.
            principal: who upgrades it.

        Raises:
            AGENT_OFFLINE, UPGRADE_NOT_ALLOWED, UPGRADE_RUNNING, DEVICES_BUSY, UPGRADE_FAILED: see AgentService.UpgradeAgent.
        """
        session = self._session(agent_id)
        if agent_id in self._running:
            raise error_for(
                "UPGRADE_RUNNING", f"Agent {agent_id} is being upgraded.", "Wait until that has ended.", agent=agent_id
            )
        upgrade = self._running[agent_id] = _Upgrade(self._new_id(), wheel.digest, session.principal)
        former = session.version
        message = agent_pb2.UpgradeAgentProgress(version=version, former_version=former)
        try:
            async with self._drained(session, f"{_REASON}{version}", principal) as devices:
                async with asyncio.timeout(drain_s) as patience:
                    try:
                        async for waits in self._wait_for_runs(devices):
                            yield _with(message, UpgradePhase.UPGRADE_PHASE_DRAINING, waits)
                    except TimeoutError:
                        if not patience.expired():
                            raise
                        what = f"Runs on the devices of agent {agent_id} did not end within {drain_s:g} s."
                        raise error_for(
                            "DEVICES_BUSY", what, "Raise --drain-timeout, or cancel their jobs.", agent=agent_id
                        ) from None
                session = self._session(agent_id)
                offer = agent_pb2.Upgrade(upgrade_id=upgrade.id, wheel=wheel, version=version, time_limit_s=limit_s)
                session.send(agent_pb2.ServerMessage(upgrade=offer))
                log.info("upgrading an agent", agent=agent_id, version=version, former=former, digest=wheel.digest)
                async for phase in self._follow(upgrade, agent_id, version, limit_s):
                    yield _with(message, phase)
        finally:
            del self._running[agent_id]

    def _session(self, agent_id: str) -> AgentSession:
        session = self._registry.session_of_agent(agent_id)
        if session is None:
            raise agent_offline(agent_id)
        if not session.allows_upgrade:
            raise error_for(
                "UPGRADE_NOT_ALLOWED",
                f"Agent {agent_id} (etfarm {session.version or 'of an unknown version'}) takes no upgrades.",
                "Start it with --allow-upgrade, or install etfarm on its machine.",
                agent=agent_id,
            )
        return session

    @asynccontextmanager
    async def _drained(self, session: AgentSession, reason: str, principal: str) -> AsyncIterator[Sequence[str]]:
        """Drain the devices that a connection serves, and yield their ids; undrain those that were not drained before."""
        devices = self._registry.served_by(session)
        drained: list[str] = []
        try:
            for device_id in devices:
                if not self._registry.get(device_id).HasField("drain"):
                    drained.append(device_id)
                    await self._registry.drain(device_id, reason[:200], principal)
            yield devices
        finally:
            # A caller that hangs up must not leave the devices drained.
            await asyncio.shield(asyncio.create_task(self._undrain(drained, reason[:200]), name="undrain"))

    async def _undrain(self, drained: Sequence[str], reason: str) -> None:
        for device_id in drained:
            known = self._registry.known([device_id])
            # An admin may have drained it again meanwhile, or forgotten it.
            if device_id in known and known[device_id].drain.reason == reason:
                await self._registry.undrain(device_id)

    async def _wait_for_runs(self, devices: Sequence[str]) -> AsyncIterator[str]:
        """Yield what is waited for whenever that changes, until no device has a run."""
        latest = None
        while True:
            self._changed.clear()
            busy = [device_id for device_id in devices if self._runs.on_device(device_id)]
            text = "" if not busy else f"{len(busy)} run{'s' if len(busy) > 1 else ''} on {', '.join(busy[:3])}"
            if text != latest:
                latest = text
                yield text
            if not busy:
                return
            try:
                async with asyncio.timeout(1.0):  # the end of a run on a drained device may change nothing else
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _follow(
        self, upgrade: _Upgrade, agent_id: str, version: str, limit_s: float
    ) -> AsyncIterator[UpgradePhase.ValueType]:
        """Yield the phases that an agent reports, until its new version has connected."""
        deadline_s = asyncio.get_running_loop().time() + INSTALL_S + limit_s + FALL_BACK_S
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    news = await upgrade.news.get()
            except TimeoutError:
                what = f"Agent {agent_id} has not connected since it was sent etfarm {version}."
                raise error_for("UPGRADE_FAILED", what, "Look at the agent's log.", agent=agent_id) from None
            if isinstance(news, agent_pb2.UpgradeProgress):
                if news.phase == UpgradePhase.UPGRADE_PHASE_FAILED:
                    raise _failed(agent_id, version, news.error)
                if news.phase == UpgradePhase.UPGRADE_PHASE_RESTARTING:
                    deadline_s = asyncio.get_running_loop().time() + limit_s + FALL_BACK_S
                yield news.phase
            elif news.upgrade.upgrade_id != upgrade.id:
                # Either it only reconnected, and goes on, or it was restarted before it could install anything.
                log.info("an agent connected during its upgrade", agent=agent_id, version=news.agent_version)
            elif news.upgrade.HasField("error"):
                raise _failed(agent_id, version, news.upgrade.error)
            else:
                log.info("an agent is upgraded", agent=agent_id, version=news.agent_version)
                yield UpgradePhase.UPGRADE_PHASE_DONE
                return


def _failed(agent_id: str, version: str, error: common_pb2.Error) -> EtfarmError:
    cause = from_proto(error)
    what = f"Agent {agent_id} was not upgraded to etfarm {version}: {cause.message}"
    return error_for("UPGRADE_FAILED", what, cause.remedy or "It runs its former version.", agent=agent_id, version=version)


def _with(
    message: agent_pb2.UpgradeAgentProgress, phase: UpgradePhase.ValueType, text: str = ""
) -> agent_pb2.UpgradeAgentProgress:
    filled = agent_pb2.UpgradeAgentProgress(phase=phase, message=text)
    filled.MergeFrom(message)
    return filled
