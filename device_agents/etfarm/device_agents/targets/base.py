"""The target of an attempt: this machine, a processor that it emulates, or a phone that is attached to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from etfarm.device_agents.conditions.gates import Gates
from etfarm.device_agents.conditions.sampler import Watch
from etfarm.device_agents.runners.bundle import Bundle
from etfarm.device_agents.runners.process import OnLog
from etfarm.device_agents.runners.remote import RemoteRunner
from etfarm.v1 import device_pb2, report_pb2
from etfarm.wire.chunks import Progressed

NO_DEADLINE_S: Final = 7 * 86_400.0
"""The limit of an attempt, and of each command to its runner, if the server sets no deadline."""


@dataclass(frozen=True)
class Provisions:
    """A program's files and the runner that it runs in, on this disk."""

    program: Path
    data: list[Path]
    bundle: Bundle | None
    """The runner's bundle; None if the target's own runner is used."""


class Target(Protocol):
    """A device of the agent."""

    @property
    def device(self) -> device_pb2.Device:
        """The device's description, as the farm has it."""

    @property
    def gates(self) -> Gates:
        """The gates that a measurement on the target waits at."""

    @property
    def tried(self) -> set[str]:
        """Digests of bundles whose runner passed its self-test here since this process began. The caller fills it."""

    @property
    def restricted(self) -> bool:
        """Whether programs are restricted to some of the cpus, which the description then lists."""

    @property
    def has_own_runner(self) -> bool:
        """Whether the target has a runner of its own, which needs no bundle."""

    @property
    def own_first(self) -> bool:
        """Whether the target's own runner is preferred to any bundle."""

    @property
    def measures_memory(self) -> bool:
        """Whether the memory of a runner's process belongs to the program, and not to an emulator."""

    @property
    def self_test_s(self) -> float:
        """The deadline of a runner's self-test, in seconds."""

    async def install(self, provisions: Provisions, on_progress: Progressed | None = None) -> None:
        """Transfer the files of the next run to the target, unless they are there already; every file is verified there.

        Raises:
            DeviceError: the target has no room, or is gone.
        """

    def start_runner(
        self, bundle: Bundle | None, folder: Path, on_log: OnLog | None
    ) -> AbstractAsyncContextManager[RemoteRunner]:
        """Start a fresh runner process under the agent's limits. The caller sets deadlines.

        Args:
            bundle: the runner's; None for the target's own.
            folder: a folder on this disk for the files that the runner writes.
        """

    def watch(self, cpus: Collection[int] | None) -> AbstractAsyncContextManager[Watch]:
        """Observe the device during a timed pass.

        Args:
            cpus: cpus that the runner is bound to; None if it may run on all.
        """

    def settings(self, cpus: Collection[int] | None) -> AbstractContextManager[list[report_pb2.DeviceSetting]]:
        """Apply the settings of a measurement and restore them afterwards; yield all settings, applied or not."""

    def divided(self, runs: int) -> Target:
        """Return the same target for one of several runs at the same time, each of which may use a part of the memory."""

    def usable_cpus(self) -> Collection[int]:
        """Return the logical cpus that an unbound runner may run on."""

    def runners_cpu_ns(self, runners: Sequence[int]) -> int | None:
        """Return the CPU time of all runners that ended, and of the running `runners`; None if it is unknown."""

    async def answers(self) -> bool:
        """Return whether the target can be reached now, after a run failed because of the device."""

    def telemetry(self, *, light: bool) -> device_pb2.DeviceTelemetry:
        """Return the telemetry for a heartbeat, at once.

        Args:
            light: whether a pass is being timed on the device, which must not be disturbed.
        """
