"""A phone as a target, by adb: its description, its state during a run, and runners on it."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from uuid import uuid4

from etfarm.device_agents.adb import AdbServer, PhoneSilent
from etfarm.device_agents.conditions.gates import Gates, Surroundings
from etfarm.device_agents.conditions.sampler import Sampled, Watch
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.device import android, inventory, readings, shell_facts
from etfarm.device_agents.runners.bundle import CONFINE, Bundle
from etfarm.device_agents.runners.process import Limits, OnLog
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.targets.base import NO_DEADLINE_S, Provisions
from etfarm.device_agents.targets.phones.errors import PhoneRefused
from etfarm.device_agents.targets.phones.folder import PhoneFolder
from etfarm.device_agents.targets.phones.runner import OwnPhoneRunner, PhoneRunner, spawn
from etfarm.v1 import device_pb2, report_pb2
from etfarm.wire.chunks import Progressed
from etfarm.wire.errors import EtfarmError

log = logging.getLogger(__name__)

_FACTS_S: Final = 20.0
_SERIALS: Final = ("ro.serialno", "ro.boot.serialno")
_SELF_TEST_S: Final = 30.0


async def ask(adb: AdbServer, serial: str, files: Collection[str], commands: Mapping[str, str]) -> dict[str, str]:
    """Return facts of the phone, read in one shell call: texts by path, or by the name of a command.

    Raises:
        PhoneRefused: the phone has no usable shell.
        DeviceError: the phone is disconnected or does not answer.
    """
    # Passed as input, since old phones accept only short command lines.
    completed = await adb.run(serial, "sh", input=shell_facts.script(files, commands).encode(), deadline_s=_FACTS_S)
    facts = shell_facts.split(completed.stdout)
    if not facts:
        raise PhoneRefused(serial, "say what it is", completed.stderr.decode(errors="replace"))
    return facts


async def recognize(adb: AdbServer, serial: str) -> device_pb2.Device:
    """Return the phone's description, without agent_id and labels. Its id is its own serial, however it is connected.

    Raises:
        As `ask`.
    """
    facts = await ask(adb, serial, inventory.PHONE_FILES, android.INVENTORY_COMMANDS)
    device = inventory.parse(facts)
    properties = android.properties(facts)
    # For a phone on the network, adb's serial is HOST:PORT, which changes.
    device.id = next((name for key in _SERIALS if (name := properties.get(key, "")) and name.lower() != "unknown"), serial)
    device.name = "-".join([*re.findall(r"\w+", device.model), device.id[-4:]]) if device.model else device.id
    return device


class Phone:
    """A phone; a `Target`. The caller keeps its adb connection.

    Args:
        adb: the adb server that lists it.
        serial: its current serial for adb.
        device: its description.
        config: the agent's settings.
    """

    restricted = False
    measures_memory = True
    self_test_s = _SELF_TEST_S

    def __init__(self, adb: AdbServer, serial: str, device: device_pb2.Device, config: AgentConfig) -> None:
        assert config.phones is not None  # the agent serves phones
        self.device = device
        self.serial = serial
        self.tried = set[str]()
        self.has_own_runner = self.own_first = config.phones.runner is not None
        self.folder = PhoneFolder(adb, serial, config.phones.limit_bytes)
        self._runners = 0
        self.gone = False
        """Whether the phone no longer answers; when it returns, another `Phone` replaces this object."""
        self.doubted = asyncio.Event()
        """Set when a run detects that the phone does not answer."""
        around = Surroundings(self._hottest_c, self._runnable, max(1, device.cores))
        folder = config.data / "phones" / re.sub(r"[^\w-]", "_", device.id)
        folder.mkdir(parents=True, exist_ok=True)
        self.gates = Gates(config.gates, around, folder / "measured")
        self._adb = adb
        self._config = config
        self._own_runner = config.phones.runner
        self._telemetry = device_pb2.DeviceTelemetry()
        self._available_bytes: int | None = None

    async def install(self, provisions: Provisions, on_progress: Progressed | None = None) -> None:
        """Transfer the files; see `Target.install`."""
        sent = await self.folder.install(provisions.bundle, [provisions.program, *provisions.data], on_progress)
        if sent:
            log.info("%d bytes were carried to the phone %s", sent, self.serial)

    @asynccontextmanager
    async def _runner(self, bundle: Bundle | None, folder: Path, on_log: OnLog | None) -> AsyncIterator[RemoteRunner]:
        if self._own_runner:
            command = shlex.split(self._own_runner)
        else:
            assert bundle is not None  # the phone has no runner of its own
            installed = self.folder.bundle(bundle)
            command = installed.command()
            if CONFINE in bundle.manifest.options:
                # On a phone the agent has the same rights as the program, so only the runner itself can drop them.
                command += [CONFINE, "--readable", str(installed.folder), "--readable", self.folder.files]
        available_bytes = self._available_bytes
        limits = Limits(None if available_bytes is None else int(available_bytes * self._config.memory_share), NO_DEADLINE_S)
        work = self.folder.run(uuid4().hex)
        kind = OwnPhoneRunner if self._own_runner else PhoneRunner
        started = kind.connect(command, Path(work), limits, on_log, partial(spawn, self._adb, self.serial, lambda: self.gone))
        self._runners += 1
        try:
            async with started as runner:
                runner.files, runner.folder = self.folder, work
                runner.must_be_confined = self._config.jail.required
                yield runner
        finally:
            self._runners -= 1
            if not self.gone:
                await self._delete(work)

    def start_runner(
        self, bundle: Bundle | None, folder: Path, on_log: OnLog | None
    ) -> AbstractAsyncContextManager[RemoteRunner]:
        """Start a runner in a folder of the phone, whose files are copied to `folder`; see `Target.start_runner`."""
        return self._runner(bundle, folder, on_log)

    @asynccontextmanager
    async def watch(self, cpus: Collection[int] | None) -> AsyncIterator[Watch]:
        """Yield a watch that reads the state only before the warm-up and after the pass: a reading starts a dozen processes."""
        watch = _StateWatch(self, time.monotonic())
        watch.before = await self.glance() or report_pb2.SystemReading()
        yield watch

    def settings(self, cpus: Collection[int] | None) -> AbstractContextManager[list[report_pb2.DeviceSetting]]:
        """Yield no settings: Android lets only root set a clock."""
        return _no_settings()

    def divided(self, runs: int) -> Phone:
        """Return the phone itself, which runs one program at a time."""
        return self

    def usable_cpus(self) -> Collection[int]:
        """Return the usable cpus; see `Target.usable_cpus`."""
        return [cpu for cluster in self.device.clusters for cpu in cluster.cpus]

    def runners_cpu_ns(self, runners: Sequence[int]) -> int | None:
        """Return None, since the phone does not report it."""
        return None

    @property
    def is_running(self) -> bool:
        """Whether a runner is running, which must not be disturbed."""
        return self._runners > 0

    async def glance(self, elapsed_ms: float = 0.0) -> report_pb2.SystemReading | None:
        """Return the state, or None if the phone's services do not answer, which must not fail a measurement."""
        try:
            return await self.look(elapsed_ms)
        except (PhoneSilent, PhoneRefused) as error:
            log.warning("%s", error)
            return None

    async def answers(self) -> bool:
        """Return whether the phone answers; see `Target.answers`."""
        assert self._config.phones is not None
        try:
            await self._adb.run(self.serial, "true", deadline_s=self._config.phones.answer_s)
        except EtfarmError:
            self.gone = True
            self.doubted.set()
            return False
        return True

    def telemetry(self, *, light: bool) -> device_pb2.DeviceTelemetry:
        """Return the state that `look` read last."""
        return self._telemetry

    def _take(self, reading: report_pb2.SystemReading) -> None:
        """Keep the state for heartbeats, and for the memory that a runner may use."""
        telemetry = device_pb2.DeviceTelemetry()
        telemetry.time.GetCurrentTime()
        if reading.HasField("load_1m"):
            telemetry.load_1m = reading.load_1m
        if reading.HasField("memory_available_bytes"):
            telemetry.memory_available_bytes = self._available_bytes = reading.memory_available_bytes
        if reading.zones:
            telemetry.temperature_c = max(zone.temperature_c for zone in reading.zones)
        clocks = [cpu.frequency_hz for cpu in reading.cpus if cpu.HasField("frequency_hz")]
        if clocks:
            telemetry.frequency_hz = round(sum(clocks) / len(clocks))
        if reading.HasField("battery_share"):
            telemetry.battery_share = reading.battery_share
        if reading.HasField("charging"):
            telemetry.charging = reading.charging
        self._telemetry = telemetry

    async def look(self, elapsed_ms: float = 0.0) -> report_pb2.SystemReading:
        """Read the state of the phone and keep it for heartbeats.

        Raises:
            As `ask`.
        """
        facts = await ask(self._adb, self.serial, readings.PHONE_FILES, android.READING_COMMANDS)
        reading = readings.parse(facts, elapsed_ms)
        self._take(reading)
        return reading

    async def _hottest_c(self) -> float | None:
        return max((zone.temperature_c for zone in (await self.look()).zones), default=None)

    async def _runnable(self) -> int | None:
        done = await self._adb.run(self.serial, f"cat {readings.LOAD}", deadline_s=_FACTS_S)
        return readings.runnable(done.stdout.decode(errors="replace"))

    async def _delete(self, remote: str) -> None:
        try:
            await self._adb.run(self.serial, f"rm -rf {shlex.quote(remote)}", deadline_s=_FACTS_S)
        except EtfarmError as error:
            # `PhoneFolder.open` deletes it when the phone is back.
            log.info("%s stays on the phone: %s", remote, error.message)


class _StateWatch:
    """A `Watch` of two readings."""

    def __init__(self, phone: Phone, began_s: float) -> None:
        self._phone = phone
        self._began_s = began_s
        self._is_timed = False
        self.before = report_pb2.SystemReading()

    def begin(self) -> None:
        """Begin the pass; see `Watch.begin`."""
        self._is_timed = True

    async def seen(self) -> Sampled | None:
        """Return the samples; see `Watch.seen`."""
        if not self._is_timed:
            return None
        after = await self._phone.glance((time.monotonic() - self._began_s) * 1e3)
        if after is None:
            return None
        for reading in (self.before, after):
            # The cpus' busy time between the readings includes the warm-up, which no counter of the pass does.
            reading.ClearField("cpu_busy_ns")
        return Sampled(self.before, after, [], 0)


@contextmanager
def _no_settings() -> Iterator[list[report_pb2.DeviceSetting]]:
    yield []
