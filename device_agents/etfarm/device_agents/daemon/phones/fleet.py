"""The fleet of `etfarm agent --adb`: each phone that the adb server lists is a device of the agent."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections import deque
from collections.abc import Coroutine
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Final

import grpc

from etfarm.device_agents.adb import AdbServer, PhoneGone, PhoneSilent, State
from etfarm.device_agents.adb import Phone as Listed
from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.attempts.fetch import try_out
from etfarm.device_agents.attempts.transfers import Transfers
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.daemon.agent import Agent
from etfarm.device_agents.targets.phones.alive import while_alive
from etfarm.device_agents.targets.phones.claim import Claim, LivenessProbe
from etfarm.device_agents.targets.phones.errors import PhoneListedTwice, own_runner_failed, phone_not_ready
from etfarm.device_agents.targets.phones.folder import ROOT
from etfarm.device_agents.targets.phones.phone import Phone, recognize
from etfarm.v1 import agent_pb2, device_pb2, farm_pb2
from etfarm.v1.artifact_pb2_grpc import ArtifactServiceStub
from etfarm.v1.common_pb2 import RunnerKind
from etfarm.v1.farm_pb2_grpc import FarmServiceStub
from etfarm.wire.errors import EtfarmError, FarmError, UserError, error_for
from etfarm.wire.farm_channel import farm_channel
from etfarm.wire.retry_backoff import retry_backoff
from etfarm.wire.status import to_proto

log = logging.getLogger(__name__)

_ARCHES: Final = ("aarch64", "x86_64")
_REFRESH_S: Final = 30.0
"""Seconds between two readings of an idle phone's state."""
_RESCUES: Final = 60
"""Maximum number of tries to reconnect to a phone with a dead link: several minutes, since its network may be down as well."""
_REMEMBERED: Final = 20
"""Number of remembered messages; a phone that cannot be served alternates between a few of them."""
_BUNDLE_S: Final = 600.0
"""Seconds within which a new phone's runner must be downloaded."""


class Fleet:
    """The phones of one agent.

    Args:
        adb: the adb server that lists them.
        agent: the agent whose devices they become.
        agent_id: the agent's UUID.
        cache: the artifact cache, for the runner that a new phone tests.
        config: the agent's settings.
    """

    def __init__(self, adb: AdbServer, agent: Agent, agent_id: str, cache: Cache, config: AgentConfig) -> None:
        assert config.phones is not None
        self._adb = adb
        self._agent = agent
        self._agent_id = agent_id
        self._config = config
        self._options = config.phones
        self._trial = Trial(config, cache)
        self._listed: dict[str, Listed] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        """Tasks of listed phones, by serial."""
        self._tasks: set[asyncio.Task[None]] = set()
        """All tasks, including those that are ending, which only their successors await."""
        self._turns: dict[str, asyncio.Lock] = {}
        """Locks that the one task serving a serial holds, by serial."""
        self._places: dict[str, asyncio.Lock] = {}
        """Locks that the one task serving a device holds, by the device's id."""
        self._known: dict[str, device_pb2.Device] = {}
        """Descriptions of recognized phones, by serial."""
        self._announced: dict[str, str] = {}
        """Ids of the devices that phones are announced as, by serial."""
        self._served: dict[str, str] = {}
        """Ids of devices that take runs, by serial. A phone on cable and Wi-Fi is listed twice and served once."""
        self._rescues: dict[str, asyncio.Task[None]] = {}
        self._failed_tries: dict[str, FailedTries] = {}
        """Failed tries to serve phones, by serial."""
        self._rescued: set[str] = set()
        """Serials whose next appearance is caused by this agent's reconnect, and not by plugging in."""

    async def run(self) -> None:
        """Follow the adb server's list until cancelled; restart an adb server that has ended."""
        pauses, logged = self._config.pauses(), ""
        try:
            while True:
                try:
                    await self._adb.start_server()
                    async with aclosing(self._adb.track()) as lists:
                        async for listed in lists:
                            pauses, logged = self._config.pauses(), ""
                            self._take({phone.serial: phone for phone in listed})
                except EtfarmError as error:
                    if logged != (logged := str(error)):
                        log.warning("%s Trying again.", error)
                except Exception:
                    # If this loop ended, the agent would lose its phones permanently.
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
        """Start and stop serving phones according to the list. No phone waits for another one."""
        changed = {serial for serial in {*self._listed, *listed} if self._listed.get(serial) != listed.get(serial)}
        for serial in listed.keys() - self._listed.keys():
            if serial in self._rescued:
                # Reconnecting did not help before, so it is not tried more often now.
                self._rescued.discard(serial)
            else:
                self._failed_tries.pop(serial, None)
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
        """Serve one phone while its entry in adb's list stays the same, once its former task has ended."""
        async with self._turns.setdefault(listed.serial, asyncio.Lock()):
            await self._serve_in_turn(listed)

    async def _serve_in_turn(self, listed: Listed) -> None:
        serial = listed.serial
        try:
            while True:
                try:
                    await self._serve_once(listed)
                except PhoneListedTwice as error:
                    if self._is_served_by_another(serial, error.device_id):  # and is not just leaving
                        await self._announce_problem(listed, error)
                    async with self._places[error.device_id]:
                        log.debug("the phone %s is left to %s", error.device_id, serial)
                except EtfarmError as error:
                    await self._handle_failure(listed, error)
                except Exception as error:
                    # A bug must not stop the service of the other phones.
                    failed = error_for("AGENT_FAILED", f"The agent failed: {type(error).__name__}: {error}.")
                    if self._tries_of(serial).is_new(str(failed)):
                        log.exception("the phone %s cannot be served", serial)
                    await self._handle_failure(listed, failed)
        finally:
            # A phone in another state is still present until more is known.
            if serial not in self._listed and (device_id := self._announced.pop(serial, None)) is not None:
                await self._agent.detach(device_id, "adb no longer lists it")

    async def _serve_once(self, listed: Listed) -> None:
        """Serve a phone until it cannot be served any more.

        Raises:
            EtfarmError: the reason.
        """
        serial = listed.serial
        if listed.state is not State.DEVICE:
            await asyncio.sleep(self._options.settle_s)
            await self._announce_problem(listed, phone_not_ready(listed))
            # A change of its state ends this.
            await asyncio.Event().wait()
        if "shell_v2" not in await self._adb.features(serial):
            raise error_for(
                "PHONE_TOO_OLD",
                f"The phone {serial} is too old: its adb does not report exit codes (shell_v2).",
                "Use one with Android 8 or later.",
                serial=serial,
            )
        probe = await LivenessProbe.open(self._adb, serial)
        try:
            device = await while_alive(recognize(self._adb, serial), probe, self._options)
        finally:
            probe.release()
        device.agent_id = self._agent_id
        device.name = "-".join(part for part in (self._config.name, device.name) if part)
        device.labels.update(self._config.labels)
        place = self._places.setdefault(device.id, asyncio.Lock())
        if place.locked():
            raise PhoneListedTwice(serial, device.id)
        async with place:
            self._known[serial] = device
            if device.arch not in _ARCHES:
                raise error_for(
                    "PHONE_UNSUPPORTED",
                    f"The phone {serial} runs {device.arch or 'unknown'} programs only, and runners are for 64-bit Arm "
                    "(aarch64).",
                    "Use a phone whose Android has 64 bits: `adb shell getprop ro.product.cpu.abilist` names arm64-v8a there.",
                    serial=serial,
                    arch=device.arch,
                )
            await self._serve_as(device, serial)

    async def _serve_as(self, device: device_pb2.Device, serial: str) -> None:
        """Serve a recognized phone, which no other serial serves."""
        phone = Phone(self._adb, serial, device, self._config)
        claim = await Claim.take(self._adb, serial, ROOT, f"agent {self._agent_id} on {socket.gethostname()}")
        try:
            await while_alive(self._enrol(phone), claim, self._options, phone)
        finally:
            phone.gone = True
            try:
                if self._served.pop(serial, None) is not None:
                    # Even if adb reports a change meanwhile: a run may still have something to send.
                    await _whole(self._agent.detach(device.id, "adb no longer reaches it"))
            finally:
                claim.release()

    async def _enrol(self, phone: Phone) -> None:
        """Make the phone a device of the farm, then read its state at intervals, without end.

        Raises:
            EtfarmError: the phone cannot be a device.
        """
        await phone.folder.open()
        await phone.look()
        await self._trial.run(phone)
        await self._announce(phone.serial, phone.device.id)
        self._served[phone.serial] = phone.device.id
        self._agent.attach(phone)
        self._failed_tries.pop(phone.serial, None)
        log.info("serving the phone %s as %s (%s)", phone.serial, phone.device.name, phone.device.id)
        while True:
            await asyncio.sleep(_REFRESH_S)
            if not phone.is_running:
                try:
                    await phone.look()
                except EtfarmError as error:
                    # The phone answers; slow services are no reason to stop serving it.
                    log.info("%s", error)

    def _is_served_by_another(self, serial: str, device_id: str) -> bool:
        return any(served == device_id for known, served in self._served.items() if known != serial)

    async def _announce(self, serial: str, device_id: str) -> None:
        """Announce the phone as this device from now on, and not as another one."""
        for other in [known for known, announced in self._announced.items() if announced == device_id]:
            # For example an entry for the phone's former port, which adb still lists as offline.
            del self._announced[other]
        former = self._announced.get(serial)
        self._announced[serial] = device_id
        if former not in (None, device_id):
            await self._agent.detach(former, "it now has its own serial")

    async def _handle_failure(self, listed: Listed, error: EtfarmError) -> None:
        """Announce why a phone cannot be served, try remedies, and return when another try is due."""
        serial = listed.serial
        if isinstance(error, PhoneGone):
            # adb's list usually says the same at once, which ends this task: a phone that left has no problem to announce.
            await asyncio.sleep(self._options.settle_s)
        await self._announce_problem(listed, error)
        tries = self._tries_of(serial)
        pause_s = tries.add()
        # adb knows that the phone is missing, and lists it again as soon as possible.
        if isinstance(error, PhoneSilent):
            if tries.count > 1:
                # A new connection did not help before.
                await asyncio.sleep(pause_s)
            rescue = self._rescues.get(serial)
            if rescue is None or rescue.done():
                self._rescues[serial] = asyncio.create_task(self._rescue(serial), name=f"rescue of {serial}")
        await asyncio.sleep(pause_s)

    async def _announce_problem(self, listed: Listed, error: EtfarmError) -> None:
        """Announce why a phone cannot be served, and log it once."""
        serial = listed.serial
        if self._tries_of(serial).is_new(str(error)):
            log.warning("%s", error)
        device = device_pb2.Device(id=serial, name=listed.model or serial)
        if (known := self._known.get(serial)) is not None:
            device.CopyFrom(known)
        device.agent_id = self._agent_id
        device.problem.CopyFrom(to_proto(error))
        if not isinstance(error, PhoneListedTwice) and not self._is_served_by_another(serial, device.id):
            await self._announce(serial, device.id)
            await self._agent.mark_unusable(device)

    def _tries_of(self, serial: str) -> FailedTries:
        return self._failed_tries.setdefault(serial, FailedTries(self._options.retry_s, self._options.retry_last_s))

    async def _rescue(self, serial: str) -> None:
        """Reconnect a phone in a separate task: the phone disappears from adb's list meanwhile, which ends its own task."""
        pauses = self._config.pauses()
        for _ in range(_RESCUES):
            self._rescued.add(serial)
            try:
                await self._adb.reconnect(serial)
                return
            except EtfarmError as error:
                if self._tries_of(serial).is_new(str(error)):
                    log.info("%s", error)
            await asyncio.sleep(self._options.retry_s + next(pauses))


async def _whole(work: Coroutine[None, None, None]) -> None:
    """Run the work to its end, and raise a cancellation only afterwards."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class FailedTries:
    """The failed tries to serve one phone since it was last served or plugged in.

    Args:
        first_s: limit in seconds of the first pause, which doubles with each try up to `last_s`.
        last_s: limit in seconds of all pauses.
    """

    def __init__(self, first_s: float, last_s: float) -> None:
        self._pauses = retry_backoff(first_s, last_s)
        self._logged = deque[str](maxlen=_REMEMBERED)
        self.count = 0
        """Number of failed tries."""

    def add(self) -> float:
        """Count a failed try and return the seconds until the next one."""
        self.count += 1
        return next(self._pauses)

    def is_new(self, message: str) -> bool:
        """Return whether this is the first call with this message."""
        if message in self._logged:
            return False
        self._logged.append(message)
        return True


class Trial:
    """Self-tests of runners on phones.

    Args:
        config: the agent's settings.
        cache: the artifact cache, for the farm's runner.
    """

    def __init__(self, config: AgentConfig, cache: Cache) -> None:
        assert config.phones is not None  # the agent serves phones
        self._config = config
        self._options = config.phones
        self._cache = cache

    async def run(self, phone: Phone) -> None:
        """Test the farm's runner for the phone, or the runner that was installed on it.

        Without a runner, or without the farm, the phone's first run does it.

        Raises:
            PHONE_RUNNER_UNUSABLE, DEVICE_RUNNER_UNUSABLE: the runner failed; the error names the signal or the system's message.
            DeviceError: the phone is gone, or has no room.
        """
        if phone.has_own_runner:
            phone.device.own_runners.append(await self._own_runner(phone))
            return
        try:
            async with AsyncExitStack() as opened:
                async with asyncio.timeout(self._options.farm_s):
                    try:
                        channel = await opened.enter_async_context(farm_channel(self._config.access))
                    except EtfarmError as error:
                        log.info("the phone %s tries its runner at the first job: %s", phone.serial, error)
                        return
                    offered = await _find_bundle(channel, phone.device.arch)
                if offered is None:
                    return
                with self._cache.lease(Transfers(ArtifactServiceStub(channel), self._config.pauses)) as lease:
                    async with asyncio.timeout(_BUNDLE_S):
                        bundle = await lease.open_bundle(offered.artifact)
                    await phone.folder.install(bundle, [])
                    await try_out(bundle, offered.artifact.digest, phone, self._config.data)
                    phone.tried.add(offered.artifact.digest)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.info("the phone %s tries its runner at the first job: %s", phone.serial, error)

    async def _own_runner(self, phone: Phone) -> device_pb2.DeviceRunner:
        """Test the runner that was installed on the phone, and return its description.

        Raises:
            PHONE_RUNNER_UNUSABLE: it does not start, or computes wrong results.
            DeviceError: the phone is gone.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="try-", dir=self._config.data) as folder:
                async with asyncio.timeout(phone.self_test_s), phone.start_runner(None, Path(folder), None) as runner:
                    hello = await runner.hello()
                    await runner.self_test()
        except (UserError, FarmError) as error:
            raise own_runner_failed(phone.serial, self._options.runner or "", error.message) from error
        except TimeoutError:
            why = f"it does not answer within {phone.self_test_s:g} s"
            raise own_runner_failed(phone.serial, self._options.runner or "", why) from None
        return device_pb2.DeviceRunner(
            kind=RunnerKind.RUNNER_KIND_OWN,
            executorch=hello.executorch,
            backends=hello.backends,
            operators=hello.operators,
        )


async def _find_bundle(channel: grpc.aio.Channel, arch: str) -> agent_pb2.RunnerBundle | None:
    """Return the farm's runner bundle for an architecture; None if the farm has none."""
    request = farm_pb2.ListBundlesRequest()
    while True:
        page = await FarmServiceStub(channel).ListBundles(request)
        for bundle in page.bundles:
            if bundle.arch == arch:
                return bundle
        if not page.next_page_token:
            return None
        request.page_token = page.next_page_token
