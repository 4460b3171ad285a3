"""`etfarm agent --adb`: every phone that the adb server lists becomes a device of the agent, and leaves it when it goes."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import aclosing, suppress
from typing import Final

import grpc

from etfarm.device_agents.adb import AdbServer, State
from etfarm.device_agents.adb import Phone as Listed
from etfarm.device_agents.agent import Agent
from etfarm.device_agents.cache import Cache, Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.phones.claim import Claim
from etfarm.device_agents.phones.errors import PhoneNotReady, PhoneTaken, PhoneUnsupported
from etfarm.device_agents.phones.folder import ROOT
from etfarm.device_agents.phones.phone import Phone, recognize
from etfarm.device_agents.provisions import try_out
from etfarm.v1 import device_pb2, farm_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from etfarm.wire.channel import open_channel
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import to_proto

log = logging.getLogger(__name__)

_ARCHES: Final = ("aarch64", "x86_64")
_REFRESH_S: Final = 30.0
"""Between two looks at a phone that is idle."""


class Fleet:
    """The phones of one agent.

    Args:
        adb: the server that knows them.
        agent: whose devices they become.
        agent_id: the agent's.
        cache: of artifacts, for the runner that a new phone tries.
        config: the agent's.
    """

    def __init__(self, adb: AdbServer, agent: Agent, agent_id: str, cache: Cache, config: AgentConfig) -> None:
        assert config.phones is not None
        self._adb = adb
        self._agent = agent
        self._agent_id = agent_id
        self._cache = cache
        self._config = config
        self._options = config.phones
        self._listed: dict[str, Listed] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, device_pb2.Device] = {}
        """What phones are that were recognized, by serial."""
        self._told: dict[str, str] = {}
        """Why phones cannot be served, as it was logged last, by serial."""

    async def find_server(self) -> None:
        """Makes sure that there is an adb server.

        Raises:
            AdbMissing, AdbServerMissing: there is none, and none can be started.
        """
        await self._adb.start_server()

    async def run(self) -> None:
        """Follows the adb server's list until it is cancelled; an adb server that is gone is started again."""
        pauses = self._config.pauses()
        try:
            while True:
                try:
                    async with aclosing(self._adb.track()) as lists:
                        async for listed in lists:
                            pauses = self._config.pauses()
                            await self._take({phone.serial: phone for phone in listed})
                except EtfarmError as error:
                    log.warning("%s Trying again.", error)
                    await self._take({})
                await asyncio.sleep(next(pauses))
                with suppress(EtfarmError):  # is told by the next try
                    await self._adb.start_server()
        finally:
            await self._take({})

    async def _take(self, listed: dict[str, Listed]) -> None:
        """Begins and ends to serve phones as the list says; what ends has ended afterwards."""
        changed = {serial for serial in {*self._listed, *listed} if self._listed.get(serial) != listed.get(serial)}
        ending = [task for serial in changed if (task := self._serving.pop(serial, None)) is not None]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)
        self._listed = listed
        for serial in sorted(changed & listed.keys()):
            self._serving[serial] = asyncio.create_task(self._serve(listed[serial]), name=f"phone {serial}")

    async def _serve(self, listed: Listed) -> None:
        """One phone, as long as adb says the same of it."""
        pauses = self._config.pauses()
        device = device_pb2.Device(id=listed.serial, name=listed.model or listed.serial)
        try:
            while True:
                device = self._known.get(listed.serial, device)
                await self._serve_once(listed, device)
                await asyncio.sleep(self._options.retry_s + next(pauses))
        finally:
            await self._agent.detach(self._known.get(listed.serial, device).id, "adb does not list it any more")

    async def _serve_once(self, listed: Listed, device: device_pb2.Device) -> None:
        """Until something keeps it from being served, which the farm is told.

        Args:
            device: what is known of it so far.
        """
        try:
            if listed.state is not State.DEVICE:
                # This ends where another state comes.
                await asyncio.sleep(self._options.settle_s)
                raise PhoneNotReady(listed)
            device = await recognize(self._adb, listed.serial)
            device.agent_id = self._agent_id
            device.name = "-".join(part for part in (self._config.name, device.name) if part)
            device.labels.update(self._config.labels)
            self._known[listed.serial] = device
            await self._serve_ready(listed.serial, device)
        except EtfarmError as error:
            if self._told.get(listed.serial) != str(error):
                self._told[listed.serial] = str(error)
                log.warning("%s", error)
            await self._trouble(listed, device, error)
        except Exception:
            # A bug must not leave the other phones alone.
            log.exception("the phone %s cannot be served", listed.serial)

    async def _serve_ready(self, serial: str, device: device_pb2.Device) -> None:
        """A phone that adb can reach: claims it, tries a runner on it, and watches that it lives.

        Raises:
            EtfarmError: it cannot be served, or not any more.
        """
        if device.arch not in _ARCHES:
            raise PhoneUnsupported(serial, device.arch)
        claim = await Claim.take(self._adb, serial, ROOT, f"agent {self._agent_id} on {socket.gethostname()}")
        try:
            phone = Phone(self._adb, serial, device, self._config)
            await phone.folder.open()
            await phone.look()
            await self._try_runner(phone)
            self._agent.attach(phone)
            self._told.pop(serial, None)
            log.info("serving the phone %s as %s (%s)", serial, device.name, device.id)
            try:
                await self._watch(phone, claim)
            finally:
                phone.gone = True
                await self._agent.detach(device.id, "adb does not reach it any more")
        finally:
            await claim.release()

    async def _watch(self, phone: Phone, claim: Claim) -> None:
        """Returns never.

        Raises:
            DeviceError: the phone does not answer.
        """
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        while True:
            await asyncio.sleep(self._options.probe_s)
            if not phone.folder.is_carrying:
                # Behind a large file an answer on a slow link comes late.
                await claim.probe(self._options.answer_s)
            if loop.time() - looked_s >= _REFRESH_S and not phone.measuring:
                looked_s = loop.time()
                await phone.look()

    async def _trouble(self, listed: Listed, device: device_pb2.Device, error: EtfarmError) -> None:
        """Tells the farm why a phone cannot be served, and tries what may help."""
        told = device_pb2.Device()
        told.CopyFrom(device)
        told.agent_id = self._agent_id
        told.problem.CopyFrom(to_proto(error))
        if not isinstance(error, PhoneTaken):
            # Another agent's device is that agent's to tell of.
            await self._agent.trouble(told)
        if listed.state is State.DEVICE and error.reason in ("PHONE_SILENT", "PHONE_GONE"):
            try:
                await self._adb.reconnect(listed.serial)
            except EtfarmError as again:
                log.info("%s", again)

    async def _try_runner(self, phone: Phone) -> None:
        """The self-test of the runner that the farm has for the phone; without one, or without the farm, at its first use.

        Raises:
            RunnerDoesNotWork: with the signal, or with what the system said.
            DeviceError: the phone is gone, or has no room.
        """
        if phone.has_own_runner:
            return
        try:
            async with open_channel(self._config.access) as channel:
                async with asyncio.timeout(self._options.farm_s):
                    listed = await FarmServiceStub(channel).ListBundles(farm_pb2.ListBundlesRequest())
                offered = next((each for each in listed.bundles if each.arch == phone.device.arch), None)
                if offered is None:
                    return
                with self._cache.lease(Transfers(ArtifactServiceStub(channel), self._config.pauses)) as lease:
                    bundle = await lease.open_bundle(offered.artifact)
                    await phone.install_runner(bundle)
                    await try_out(bundle, offered.artifact.digest, phone, self._config.data)
                    phone.tried.add(offered.artifact.digest)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.info("the phone %s tries its runner at the first job: %s", phone.serial, error)
