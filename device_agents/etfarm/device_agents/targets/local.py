"""This machine, or a processor that it emulates, as a target: local processes, and files of this kernel."""

from __future__ import annotations

import asyncio
import copy
import os
import resource
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path

import psutil

from etfarm.device_agents.conditions.gates import Gates, Surroundings
from etfarm.device_agents.conditions.governor import KEPT_GOVERNORS, Governors
from etfarm.device_agents.conditions.sampler import Sampler, Watch, watched
from etfarm.device_agents.conditions.telemetry import Telemetry
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.jail.confine import Jail, python_programs
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.native import NativeRunner
from etfarm.device_agents.runners.process import Limits, OnLog
from etfarm.device_agents.runners.python import PythonRunner
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.device_agents.targets.base import NO_DEADLINE_S, Provisions
from etfarm.v1 import device_pb2, report_pb2
from etfarm.wire.chunks import Progressed


class Machine:
    """This machine, or an emulated processor; a `Target`.

    Args:
        config: the agent's settings; with an emulator this is the emulated processor.
        device: its description.
        jail: confines the machine's runners; a new Jail if None.
    """

    def __init__(self, config: AgentConfig, device: device_pb2.Device, jail: Jail | None = None) -> None:
        self.device = device
        self.jail = jail or Jail(config.jail)
        self.gates = Gates(config.gates, Surroundings.of_machine(), config.data / "measured")
        self.tried = set[str]()
        self.restricted = config.cores is not None
        self.measures_memory = config.emulator is None
        self.has_own_runner = config.emulator is None and PythonRunner.available()
        self.own_first = False
        self.self_test_s = config.self_test_s
        self._config = config
        self._memory_share = config.memory_share
        self._governors = Governors(config.data / KEPT_GOVERNORS, config.governor)
        self._telemetry = Telemetry(config.data)

    async def install(self, provisions: Provisions, on_progress: Progressed | None = None) -> None:
        """Do nothing, since all files are here."""

    def start_runner(
        self, bundle: Bundle | None, folder: Path, on_log: OnLog | None
    ) -> AbstractAsyncContextManager[RemoteRunner]:
        """Start a runner that works in `folder`; see `Target.start_runner`."""
        return self._runner(bundle, folder, on_log)

    @asynccontextmanager
    async def _runner(self, bundle: Bundle | None, folder: Path, on_log: OnLog | None) -> AsyncIterator[RemoteRunner]:
        emulator = self._config.emulator
        data_bytes = int(psutil.virtual_memory().available * self._memory_share)
        limits = Limits(data_bytes, NO_DEADLINE_S)
        prefix = () if emulator is None else emulator.within(data_bytes)
        if not (await self.jail.measures()).active:
            started: AbstractAsyncContextManager[RemoteRunner]
            if bundle is None:
                started = PythonRunner.start(folder, limits=limits, on_log=on_log)
            else:
                started = NativeRunner.start(bundle.command(prefix), folder, limits=limits, on_log=on_log)
            async with started as runner:
                yield runner
            return
        with self.jail.box(folder) as box:
            if bundle is None:
                spawn = self.jail.spawn(box, await asyncio.to_thread(python_programs))
                started = PythonRunner.start(folder, limits=limits, on_log=on_log, spawn=spawn)
            else:
                command = box.place_bundle(bundle, prefix)
                spawn = self.jail.spawn(box, [] if emulator is None else [Path(emulator.path)])
                started = NativeRunner.start(command, folder, limits=limits, on_log=on_log, spawn=spawn)
            async with started as runner:
                runner.path_for_runner = box.path_for_runner
                yield runner

    def watch(self, cpus: Collection[int] | None) -> AbstractAsyncContextManager[Watch]:
        """Observe the machine; see `Target.watch`."""
        return watched(lambda: Sampler([list(cluster.cpus) for cluster in self.device.clusters], cpus))

    def settings(self, cpus: Collection[int] | None) -> AbstractContextManager[list[report_pb2.DeviceSetting]]:
        """Set the cpus' governors; see `Target.settings`."""
        return self._governors.held(cpus)

    def divided(self, runs: int) -> Machine:
        """Return this machine with a part of the memory; see `Target.divided`."""
        part = copy.copy(self)
        part._memory_share = self._memory_share / runs
        return part

    def usable_cpus(self) -> Collection[int]:
        """Return the usable cpus; see `Target.usable_cpus`."""
        return os.sched_getaffinity(0)

    def runners_cpu_ns(self, runners: Sequence[int]) -> int | None:
        """Return the runners' CPU time; see `Target.runners_cpu_ns`."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return round((ended.ru_utime + ended.ru_stime) * 1e9) + sum(_cpu_ns(pid) for pid in runners)

    async def answers(self) -> bool:
        """Return True: this machine can always be reached."""
        return True

    def telemetry(self, *, light: bool) -> device_pb2.DeviceTelemetry:
        """Return the telemetry; see `Target.telemetry`."""
        return self._telemetry.read(light=light)


def _cpu_ns(pid: int) -> int:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0  # the process has just ended
    return round((times.user + times.system) * 1e9)
