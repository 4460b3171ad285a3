"""Attempts on devices, for jobs and for sessions alike: each occupies a device, is sent to the device's agent, and is ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC

from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.errors import DeviceOffline
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.reservations import Reservations
from etfarm.server.devices.runners import Runner, demand_runner
from etfarm.server.devices.runs import Progressed, Runs
from etfarm.server.devices.scheduling.forecast import NO_WORKLOAD, Workload
from etfarm.server.devices.scheduling.waiting import Waiting
from etfarm.server.jobs.cells.placement import ANYTHING, Placement, Subject
from etfarm.v1 import agent_pb2
from etfarm.v1.common_pb2 import Artifact
from etfarm.v1.device_pb2 import Device
from etfarm.v1.job_pb2 import Attempt


class DeviceAttempts:
    """The attempts that occupy devices, from the queue to the device that is free again."""

    def __init__(
        self,
        registry: Registry,
        runs: Runs,
        placement: Placement,
        bundles: Bundles,
        new_id: Callable[[], str],
        reservations: Reservations | None = None,
    ) -> None:
        self._reservations = reservations
        self._registry = registry
        self._runs = runs
        self._placement = placement
        self._bundles = bundles
        self._new_id = new_id

    @property
    def starting(self) -> str:
        """Description of what the farm has to finish before anything can run; empty if nothing."""
        return self._bundles.starting

    def device(self, device_id: str) -> Device:
        """Return a device as its agent last described it."""
        return self._registry.get(device_id)

    def is_on_this_machine(self, device_id: str) -> bool:
        """Return whether the device's agent runs on the server's own machine."""
        return self._registry.is_on_this_machine(device_id)

    async def place(
        self, waiting: Waiting, on_progress: Progressed, on_wait: Callable[[str], None], subject: Subject = ANYTHING
    ) -> tuple[Device, str]:
        """Wait for a device, occupy it with a new attempt, and return the device and the attempt's id.

        Args:
            waiting: the cell, or session.
            on_progress: called with the progress that the device reports.
            on_wait: called with the reason for waiting whenever that changes.
            subject: what waits, for people.

        Raises:
            DeadlineMissed, MAX_WAIT_OVER: no device was free in time.
            ReservationNotFound, ReservationEnded: the reservation that the waiting run names is not there any more.
        """
        attempt_id = self._new_id()
        placing = self._placement.device(waiting, attempt_id, on_progress, on_wait, subject)
        if self._reservations is None or not waiting.reservation:
            return await placing, attempt_id
        try:
            return await self._reservations.while_current(waiting.reservation, waiting.project, placing), attempt_id
        except BaseException:
            self._placement.free(attempt_id)  # a device may have been chosen just before
            raise

    def occupy(self, device_id: str, on_progress: Progressed) -> str:
        """Occupy a device with a new attempt of the farm's own, past the queue, and return the attempt's id.

        Other attempts may still run there (`Runs.wait_alone`); no further one is placed.
        """
        attempt_id = self._new_id()
        self._placement.occupy(attempt_id, device_id, on_progress)
        return attempt_id

    def is_wanted(self, device: Device) -> bool:
        """Return whether a cell or session in the queue could run on the device."""
        return self._placement.is_wanted(device)

    def rejoin(
        self,
        attempt: Attempt,
        on_progress: Progressed,
        *,
        project: str,
        owner: str = "",
        exclusive: bool = True,
        work: Workload = NO_WORKLOAD,
    ) -> None:
        """Occupy a device with an attempt that an earlier server sent, and wait for its agent."""
        device_id = attempt.device_id
        self._runs.begin(attempt.id, device_id, on_progress, sent=True, project=project, exclusive=exclusive)
        self._runs.device_went(device_id)
        self._placement.adopt(attempt.id, device_id, (project, owner), work, attempt.start_time.ToDatetime(UTC))

    async def runner_of(self, device: Device) -> Runner:
        """Return the runner that the device uses, waiting for a bundle that is being built.

        Raises:
            BUNDLE_MISSING: there is no runner.
            EtfarmError: building the bundle failed.
        """
        return await demand_runner(self._bundles, device)

    def send(self, start: agent_pb2.StartRun, artifacts: Iterable[Artifact]) -> None:
        """Send an attempt to its device.

        Args:
            artifacts: what its agent needs to read, beside the runner bundles.

        Raises:
            DeviceOffline: the device has disconnected in the meantime.
        """
        needed = list(artifacts)
        for candidate in start.candidates:
            if candidate.HasField("bundle"):
                needed.append(candidate.bundle.artifact)
                # The agent reads the operators from the bundle itself.
                del candidate.bundle.operators[:]
        session = self._registry.session_of(start.device_id)
        self._runs.mark_sent(start.attempt_id)
        self._placement.note_sent(start.device_id, [candidate.program.pte.digest for candidate in start.candidates])
        self.permit(start.attempt_id, needed)
        session.send(agent_pb2.ServerMessage(start_run=start))

    def permit(self, attempt_id: str, artifacts: Iterable[Artifact]) -> None:
        """Permit the attempt's agent to read artifacts in addition to earlier ones."""
        self._runs.permit(attempt_id, [artifact.digest for artifact in artifacts])

    def is_live(self, attempt_id: str) -> bool:
        """Return whether the attempt occupies a device."""
        return self._runs.knows(attempt_id)

    def has_answer(self, attempt_id: str) -> bool:
        """Return whether the agent's result has arrived."""
        return self._runs.has_answer(attempt_id)

    async def result(self, attempt_id: str) -> agent_pb2.RunResult:
        """Wait for the agent's result.

        Raises:
            AttemptLost: the attempt is lost.
        """
        return await self._runs.result(attempt_id)

    def acknowledge(self, attempt_id: str, device_id: str) -> None:
        """Let the agent delete an attempt whose result was read, and free the device."""
        self._end(attempt_id, device_id, agent_pb2.ServerMessage(ack=agent_pb2.Ack(attempt_id=attempt_id)))

    def cancel(self, attempt_id: str, device_id: str, reason: str) -> None:
        """Let the agent stop an attempt, and free the device."""
        cancel = agent_pb2.CancelRun(attempt_id=attempt_id, reason=reason)
        self._end(attempt_id, device_id, agent_pb2.ServerMessage(cancel_run=cancel))

    def _end(self, attempt_id: str, device_id: str, message: agent_pb2.ServerMessage) -> None:
        with suppress(DeviceOffline):
            self._registry.session_of(device_id).send(message)
        self._placement.free(attempt_id)
