"""The installation of a wheel that the server offers: fetched by its digest, unpacked, tried, and left to the launcher."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import grpc

from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.daemon.launcher import CONNECTED_VARIABLE, UPGRADE_VARIABLE
from etfarm.device_agents.daemon.versions import BadWheel, Version, Versions
from etfarm.v1 import agent_pb2
from etfarm.v1.agent_pb2 import UpgradePhase
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.farm_channel import farm_channel
from etfarm.wire.shielding import end_tasks
from etfarm.wire.status import from_rpc_error, to_proto

log = logging.getLogger(__name__)

_DOWNLOAD_S: Final = 600.0
_TRY_S: Final = 60.0
"""How long the new version may take to print its help."""
_MOST_LIMIT_S: Final = 3600.0
_SHOWN: Final = 500


class Upgrader:
    """The upgrades of this agent.

    Args:
        config: the agent's settings.
        cache: holds the wheel while it is unpacked.
        versions: the versions that may run.
        send: sends messages to the server.
        active: returns the running attempts.
        restart: ends this process so that its launcher starts the next version.
    """

    def __init__(
        self,
        config: AgentConfig,
        cache: Cache,
        versions: Versions,
        send: Callable[[agent_pb2.AgentMessage], None],
        active: Callable[[], Sequence[str]],
        restart: Callable[[], None],
    ) -> None:
        self._config = config
        self._cache = cache
        self._versions = versions
        self._send = send
        self._active = active
        self._restart = restart
        self._task: asyncio.Task[None] | None = None

    @property
    def is_allowed(self) -> bool:
        """Whether this agent installs what the server offers."""
        return self._config.allow_upgrade

    def outcome(self) -> agent_pb2.UpgradeOutcome | None:
        """Return how the last upgrade ended, or that this process is the new version that is tried; None without one."""
        state = self._versions.read()
        if (trial := state.trial) is not None and os.environ.get(UPGRADE_VARIABLE) == trial.upgrade_id:
            return agent_pb2.UpgradeOutcome(upgrade_id=trial.upgrade_id, version=trial.version)
        if (known := state.outcome) is None:
            return None
        outcome = agent_pb2.UpgradeOutcome(upgrade_id=known.get("upgrade_id", ""), version=known.get("version", ""))
        if why := known.get("error"):
            what = f"etfarm {outcome.version} {why}."
            outcome.error.CopyFrom(
                to_proto(error_for("UPGRADE_REFUSED", what, "The former version runs again; see the agent's log."))
            )
        return outcome

    def start(self, upgrade: agent_pb2.Upgrade) -> None:
        """Begin an upgrade, or answer that another one is going on."""
        if self._task is not None and not self._task.done():
            self._fail(
                upgrade, error_for("UPGRADE_REFUSED", "Another upgrade of this agent is going on.", "Wait until it has ended.")
            )
            return
        self._task = asyncio.create_task(self._upgrade(upgrade), name="upgrade")

    async def close(self) -> None:
        """End an upgrade that is going on; the present version stays."""
        if self._task is not None:
            await end_tasks(self._task)

    async def _upgrade(self, upgrade: agent_pb2.Upgrade) -> None:
        try:
            self._require_possible(upgrade)
            self._report(upgrade, UpgradePhase.UPGRADE_PHASE_DOWNLOADING)
            folder = await self._fetch(upgrade)
            await self._try(folder, upgrade.version)
            self._require_possible(upgrade)
            limit_s = min(max(upgrade.time_limit_s, 1.0), _MOST_LIMIT_S)
            trial = Version(folder, upgrade.version, upgrade.upgrade_id, limit_s)
            self._versions.write(replace(self._versions.read(), trial=trial))
        except EtfarmError as error:
            self._fail(upgrade, error)
        except (OSError, BadWheel, TimeoutError) as error:
            why = "it took too long" if isinstance(error, TimeoutError) else str(error)
            self._fail(upgrade, error_for("UPGRADE_REFUSED", f"etfarm {upgrade.version} cannot be installed: {why}."))
        else:
            log.info("etfarm %s is installed; this process ends for it", upgrade.version)
            self._report(upgrade, UpgradePhase.UPGRADE_PHASE_RESTARTING)
            self._restart()

    def _require_possible(self, upgrade: agent_pb2.Upgrade) -> None:
        """Check that the agent may be upgraded now.

        Raises:
            UPGRADE_REFUSED: it may not.
        """
        if not self.is_allowed:
            raise error_for("UPGRADE_REFUSED", "This agent takes no upgrades.", "Start it with --allow-upgrade.")
        if self._active():
            raise error_for("UPGRADE_REFUSED", "The agent has running attempts.", "Wait until they have ended.")

    async def _fetch(self, upgrade: agent_pb2.Upgrade) -> str:
        """Download and unpack the wheel; return the name of its folder."""
        async with asyncio.timeout(_DOWNLOAD_S), farm_channel(self._config.access) as channel:
            try:
                with self._cache.lease(Transfers(ArtifactServiceStub(channel), self._config.pauses)) as lease:
                    wheel = await lease.fetch(upgrade.wheel)
                    self._report(upgrade, UpgradePhase.UPGRADE_PHASE_INSTALLING)
                    return await asyncio.to_thread(self._versions.unpack, wheel, upgrade.version, upgrade.wheel.digest)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, server=self._config.access.server) from None

    async def _try(self, folder: str, version: str) -> None:
        """Start the new version's command, which shows whether it has what it imports, and that it is this version.

        Raises:
            UPGRADE_REFUSED: it does not start.
        """
        path = str(self._versions.folder / folder)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH", "")]))}
        environment.pop(CONNECTED_VARIABLE, None)
        for arguments, expected in ((["--version"], f"etfarm {version}"), (["agent", "--help"], "--allow-upgrade")):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "etfarm.wire.command", *arguments, env=environment,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(_TRY_S):
                    output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            text = output.decode("utf-8", "replace")
            if process.returncode or expected not in text:
                what = f"`etfarm {' '.join(arguments)}` of etfarm {version} does not print {expected!r}: {text[-_SHOWN:].strip()}"
                raise error_for("UPGRADE_REFUSED", what, "Install what it lacks on the agent's machine.")

    def _fail(self, upgrade: agent_pb2.Upgrade, error: EtfarmError) -> None:
        log.warning("the upgrade to etfarm %s failed: %s", upgrade.version, error)
        progress = agent_pb2.UpgradeProgress(
            upgrade_id=upgrade.upgrade_id, phase=UpgradePhase.UPGRADE_PHASE_FAILED, error=to_proto(error)
        )  # fmt: skip
        self._send(agent_pb2.AgentMessage(upgrade_progress=progress))

    def _report(self, upgrade: agent_pb2.Upgrade, phase: UpgradePhase.ValueType) -> None:
        progress = agent_pb2.UpgradeProgress(upgrade_id=upgrade.upgrade_id, phase=phase)
        self._send(agent_pb2.AgentMessage(upgrade_progress=progress))


def report_connected() -> None:
    """Tell the launcher that this process has connected; does nothing without a launcher that waits for it."""
    descriptor = int(os.environ.get(CONNECTED_VARIABLE, "-1"))
    if descriptor < 0:
        return
    os.environ[CONNECTED_VARIABLE] = "-1"
    try:
        os.write(descriptor, b"+")
        os.close(descriptor)
    except OSError as error:
        log.warning("the launcher cannot be told of the connection: %s", error)
