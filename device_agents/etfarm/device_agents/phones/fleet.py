"""`etfarm agent --adb`: every phone that the adb server lists becomes a device of the agent, and leaves it when it goes."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.adb import AdbServer, PhoneGone, PhoneSilent, State
from etfarm.device_agents.adb import Phone as Listed
from etfarm.device_agents.agent import Agent
from etfarm.device_agents.cache import Cache, Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.errors import AgentFailed
from etfarm.device_agents.phones.claim import Claim
from etfarm.device_agents.phones.errors import (
    OwnRunnerFailed,
    PhoneListedTwice,
    PhoneNotReady,
    PhoneTooOld,
    PhoneUnsupported,
)
from etfarm.device_agents.phones.folder import ROOT
from etfarm.device_agents.phones.patience import Patience
from etfarm.device_agents.phones.phone import Phone, recognize
from etfarm.device_agents.provisions import try_out
from etfarm.v1 import device_pb2, farm_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from etfarm.wire.channel import open_channel
from etfarm.wire.errors import EtfarmError, FarmError, UserError
from etfarm.wire.status import to_proto

log = logging.getLogger(__name__)

_ARCHES: Final = ("aarch64", "x86_64")
_REFRESH_S: Final = 30.0
"""Between two looks at a phone that is idle."""
_RESCUES: Final = 60
"""Tries to connect again to a phone whose link is dead: for minutes, since its network may be away as well."""
_BUNDLE_S: Final = 600.0
"""How long the runner for a new phone may be on its way from the farm."""


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
        """Those of phones that are listed, by serial."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Those and the ones that still end: nobody waits for them but who comes after them."""
        self._turns: dict[str, asyncio.Lock] = {}
        """Held by the one task that serves a serial, ..."""
        self._places: dict[str, asyncio.Lock] = {}
        """... and by the one that serves a device, by its id."""
        self._known: dict[str, device_pb2.Device] = {}
        """What phones are that were recognized, by serial."""
        self._announced: dict[str, str] = {}
        """The device that each serial's phone is told as."""
        self._served: dict[str, str] = {}
        """Those that can be given runs. A phone by cable and Wi-Fi is listed twice, and is one device by one of the two."""
        self._rescues: dict[str, asyncio.Task[None]] = {}
        self._patience: dict[str, Patience] = {}
        """With phones that could not be served, by serial."""
        self._rescued: set[str] = set()
        """Phones that are plugged in anew by this agent, and not by anybody else."""

    async def find_server(self) -> None:
        """Makes sure that there is an adb server.

        Raises:
            AdbMissing, AdbServerMissing: there is none, and none can be started.
        """
        await self._adb.start_server()

    async def run(self) -> None:
        """Follows the adb server's list until it is cancelled; an adb server that is gone is started again."""
        pauses, said = self._config.pauses(), ""
        try:
            while True:
                try:
                    await self._adb.start_server()
                    async with aclosing(self._adb.track()) as lists:
                        async for listed in lists:
                            pauses, said = self._config.pauses(), ""
                            self._take({phone.serial: phone for phone in listed})
                except EtfarmError as error:
                    if said != (said := str(error)):
                        log.warning("%s Trying again.", error)
                except Exception:
                    # Without this loop the agent would have no phones for good.
                    log.exception("the phones cannot be followed")
                self._take({})
                await asyncio.sleep(next(pauses))
        finally:
            self._take({})
            ending = [*self._tasks, *self._rescues.values()]
            for task in self._rescues.values():
                task.cancel()
            if ending:
                await asyncio.wait(ending)

    def _take(self, listed: dict[str, Listed]) -> None:
        """Begins and ends to serve phones as the list says. No phone waits for another one."""
        changed = {serial for serial in {*self._listed, *listed} if self._listed.get(serial) != listed.get(serial)}
        for serial in listed.keys() - self._listed.keys():
            if serial in self._rescued:
                # What did not help before is not tried more often for that.
                self._rescued.discard(serial)
            else:
                self._patience.pop(serial, None)
        self._listed = listed
        for serial in sorted(changed):
            if (former := self._serving.pop(serial, None)) is not None:
                former.cancel()
            if serial in listed:
                task = asyncio.create_task(self._serve(listed[serial]), name=f"phone {serial}")
                self._serving[serial] = task
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, listed: Listed) -> None:
        """One phone, as long as adb says the same of it, once what was served of it before has ended."""
        async with self._turns.setdefault(listed.serial, asyncio.Lock()):
            await self._serve_in_turn(listed)

    async def _serve_in_turn(self, listed: Listed) -> None:
        serial = listed.serial
        try:
            while True:
                try:
                    await self._serve_once(listed)
                except PhoneListedTwice as error:
                    if self._is_served_by_another(serial, error.device_id):  # and not just leaving
                        await self._tell(listed, error)
                    async with self._places[error.device_id]:
                        log.debug("the phone %s is left to %s", error.device_id, serial)
                except EtfarmError as error:
                    await self._trouble(listed, error)
                except Exception as error:
                    # A bug must not leave the other phones alone.
                    failed = AgentFailed(f"The agent failed: {type(error).__name__}: {error}.")
                    if self._patience_with(serial).is_new(str(failed)):
                        log.exception("the phone %s cannot be served", serial)
                    await self._trouble(listed, failed)
        finally:
            # One that is in another state now is still there, until more is known of it.
            if serial not in self._listed and (device_id := self._announced.pop(serial, None)) is not None:
                await self._agent.detach(device_id, "adb does not list it any more")

    async def _serve_once(self, listed: Listed) -> None:
        """Until something keeps the phone from being served.

        Raises:
            EtfarmError: what it is.
        """
        serial = listed.serial
        if listed.state is not State.DEVICE:
            await asyncio.sleep(self._options.settle_s)
            await self._tell(listed, PhoneNotReady(listed))
            # Another state ends this.
            await asyncio.Event().wait()
        if "shell_v2" not in await self._adb.features(serial):
            raise PhoneTooOld(serial)
        device = await recognize(self._adb, serial)
        device.agent_id = self._agent_id
        device.name = "-".join(part for part in (self._config.name, device.name) if part)
        device.labels.update(self._config.labels)
        place = self._places.setdefault(device.id, asyncio.Lock())
        if place.locked():
            raise PhoneListedTwice(serial, device.id)
        async with place:
            self._known[serial] = device
            if device.arch not in _ARCHES:
                raise PhoneUnsupported(serial, device.arch)
            await self._serve_as(device, serial)

    async def _serve_as(self, device: device_pb2.Device, serial: str) -> None:
        """`_serve_once` of a phone that is the device, and is served in no other way."""
        phone = Phone(self._adb, serial, device, self._config)
        claim = await Claim.take(self._adb, serial, ROOT, f"agent {self._agent_id} on {socket.gethostname()}")
        try:
            await phone.folder.open()
            await phone.look()
            await self._try_runner(phone)
            await self._announce(serial, device.id)
            self._served[serial] = device.id
            self._agent.attach(phone)
            self._patience.pop(serial, None)
            log.info("serving the phone %s as %s (%s)", serial, device.name, device.id)
            await self._watch(phone, claim)
        finally:
            phone.gone = True
            try:
                if self._served.pop(serial, None) is not None:
                    # Whatever adb says meanwhile: a run may have something left to send.
                    await _whole(self._agent.detach(device.id, "adb does not reach it any more"))
            finally:
                claim.release()

    def _is_served_by_another(self, serial: str, device_id: str) -> bool:
        return any(served == device_id for known, served in self._served.items() if known != serial)

    async def _announce(self, serial: str, device_id: str) -> None:
        """What is told of the phone from here on is told of that device, and not of another."""
        for other in [known for known, told in self._announced.items() if told == device_id]:
            # An entry of a port that the phone had before, for example, which adb still lists as offline.
            del self._announced[other]
        former = self._announced.get(serial)
        self._announced[serial] = device_id
        if former not in (None, device_id):
            await self._agent.detach(former, "it is known by its own serial now")

    async def _watch(self, phone: Phone, claim: Claim) -> None:
        """Returns never.

        Raises:
            DeviceError: the phone does not answer.
        """
        loop = asyncio.get_running_loop()
        looked_s = loop.time()
        lost = {
            asyncio.create_task(claim.ended(), name=f"the claim of {phone.serial}"),
            asyncio.create_task(phone.doubted.wait(), name=f"doubts of {phone.serial}"),
        }
        try:
            while True:
                done, _ = await asyncio.wait(lost, timeout=self._options.probe_s, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    raise PhoneGone(phone.serial, "its shell ended")
                if not phone.folder.is_carrying:
                    # Behind a large file an answer on a slow link comes late.
                    await claim.probe(self._options.answer_s)
                if loop.time() - looked_s >= _REFRESH_S and not phone.is_running:
                    looked_s = loop.time()
                    try:
                        await phone.look()
                    except EtfarmError as error:
                        # It answers; that its services are slow is no reason to leave it.
                        log.info("%s", error)
        finally:
            for task in lost:
                task.cancel()
            await asyncio.wait(lost)

    async def _trouble(self, listed: Listed, error: EtfarmError) -> None:
        """Tells the farm why a phone cannot be served, tries what may help, and returns when it is time for another try."""
        serial = listed.serial
        await self._tell(listed, error)
        patience = self._patience_with(serial)
        pause_s = patience.pause_s()
        # Of one that is gone adb knows, and has it back as soon as it can be.
        if isinstance(error, PhoneSilent):
            if patience.tries > 1:
                # A new connection did not help before.
                await asyncio.sleep(pause_s)
            rescue = self._rescues.get(serial)
            if rescue is None or rescue.done():
                self._rescues[serial] = asyncio.create_task(self._rescue(serial), name=f"rescue of {serial}")
        await asyncio.sleep(pause_s)

    async def _tell(self, listed: Listed, error: EtfarmError) -> None:
        """Tells the farm why a phone cannot be served, and people once."""
        serial = listed.serial
        if self._patience_with(serial).is_new(str(error)):
            log.warning("%s", error)
        told = device_pb2.Device(id=serial, name=listed.model or serial)
        if (known := self._known.get(serial)) is not None:
            told.CopyFrom(known)
        told.agent_id = self._agent_id
        told.problem.CopyFrom(to_proto(error))
        if not isinstance(error, PhoneListedTwice) and not self._is_served_by_another(serial, told.id):
            await self._announce(serial, told.id)
            await self._agent.trouble(told)

    def _patience_with(self, serial: str) -> Patience:
        return self._patience.setdefault(serial, Patience(self._options.retry_s, self._options.retry_last_s))

    async def _rescue(self, serial: str) -> None:
        """Gives a phone a new connection. It is off adb's list meanwhile, so this is nothing that its serving does itself."""
        pauses = self._config.pauses()
        self._rescued.add(serial)
        for _ in range(_RESCUES):
            try:
                await self._adb.reconnect(serial)
                return
            except EtfarmError as error:
                if self._patience_with(serial).is_new(str(error)):
                    log.info("%s", error)
            await asyncio.sleep(self._options.retry_s + next(pauses))

    async def _own_runner(self, phone: Phone) -> device_pb2.DeviceRunner:
        """What the runner that was put on the phone can do; it has tested itself.

        Raises:
            OwnRunnerFailed: it does not start, or computes wrongly.
            DeviceError: the phone is gone.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="try-", dir=self._config.data) as folder:
                async with asyncio.timeout(phone.self_test_s), phone.start_runner(None, Path(folder), None) as runner:
                    hello = await runner.hello()
                    await runner.self_test()
        except (UserError, FarmError) as error:
            raise OwnRunnerFailed(phone.serial, self._options.runner or "", error.message) from error
        except TimeoutError:
            why = f"it does not answer within {phone.self_test_s:g} s"
            raise OwnRunnerFailed(phone.serial, self._options.runner or "", why) from None
        return device_pb2.DeviceRunner(
            kind=runner.kind, executorch=hello.executorch, backends=hello.backends, operators=hello.operators
        )

    async def _try_runner(self, phone: Phone) -> None:
        """The self-test of the runner that the farm has for the phone; without one, or without the farm, at its first use.

        Raises:
            RunnerDoesNotWork: with the signal, or with what the system said.
            DeviceError: the phone is gone, or has no room.
        """
        if phone.has_own_runner:
            phone.device.own_runners.append(await self._own_runner(phone))
            return
        try:
            async with open_channel(self._config.access) as channel:
                async with asyncio.timeout(self._options.farm_s):
                    listed = await FarmServiceStub(channel).ListBundles(farm_pb2.ListBundlesRequest())
                offered = next((each for each in listed.bundles if each.arch == phone.device.arch), None)
                if offered is None:
                    return
                with self._cache.lease(Transfers(ArtifactServiceStub(channel), self._config.pauses)) as lease:
                    async with asyncio.timeout(_BUNDLE_S):
                        bundle = await lease.open_bundle(offered.artifact)
                    await phone.install_runner(bundle)
                    await try_out(bundle, offered.artifact.digest, phone, self._config.data)
                    phone.tried.add(offered.artifact.digest)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.info("the phone %s tries its runner at the first job: %s", phone.serial, error)


async def _whole(work: Coroutine[None, None, None]) -> None:
    """Does it to its end; whoever is cancelled meanwhile is so afterwards."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
