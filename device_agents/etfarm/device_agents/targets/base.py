"""What programs run on, as an attempt sees it: this machine, a processor that it emulates, or a phone that is attached to it."""

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
    """None where none came, and the target has a runner of its own."""


class Target(Protocol):
    """One device of the agent. It serves one attempt at a time."""

    @property
    def device(self) -> device_pb2.Device:
        """What the farm knows of it."""

    @property
    def gates(self) -> Gates:
        """What a measurement on it waits for."""

    @property
    def tried(self) -> set[str]:
        """Digests of bundles whose runner has worked on it since this process began. For the caller to fill."""

    @property
    def restricted(self) -> bool:
        """Whether programs may use some of its cpus only, which are those of the device."""

    @property
    def has_own_runner(self) -> bool:
        """Whether programs run on it without a bundle."""

    @property
    def own_first(self) -> bool:
        """Whether that runner goes before any bundle."""

    @property
    def measures_memory(self) -> bool:
        """Whether the memory of a runner's process is the program's, and not an emulator's."""

    @property
    def self_test_s(self) -> float:
        """Deadline of a runner's self-test."""

    async def install(self, provisions: Provisions, on_progress: Progressed | None = None) -> None:
        """Carries there what is not there yet; every file is verified there. For the run that comes next.

        Raises:
            DeviceError: it has no room, or is gone.
        """

    def start_runner(
        self, bundle: Bundle | None, folder: Path, on_log: OnLog | None
    ) -> AbstractAsyncContextManager[RemoteRunner]:
        """A fresh runner process under the agent's limits. Deadlines are the caller's.

        Args:
            bundle: the runner's; None for the target's own.
            folder: on this disk, for the files that the runner writes.
        """

    def watch(self, cpus: Collection[int] | None) -> AbstractAsyncContextManager[Watch]:
        """Sees what the device does beside a timed pass.

        Args:
            cpus: that the runner is bound to; None where it may run on all.
        """

    def settings(self, cpus: Collection[int] | None) -> AbstractContextManager[list[report_pb2.DeviceSetting]]:
        """Sets for a measurement what may be set, and puts it back. Gives what was to be changed, even where it was not."""

    def usable_cpus(self) -> Collection[int]:
        """Logical cpus that a runner may run on which is bound to none."""

    def runners_cpu_ns(self, runners: Sequence[int]) -> int | None:
        """CPU time of all runners that ended since this process began, and of `runners`, which live; None where nobody tells."""

    async def answers(self) -> bool:
        """Whether it can be reached now; asked when a run on it has just ended by the device."""

    def telemetry(self, *, light: bool) -> device_pb2.DeviceTelemetry:
        """For a heartbeat; returns at once.

        Args:
            light: a pass is timed on the device, which nothing should disturb.
        """
