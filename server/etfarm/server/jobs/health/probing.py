"""Which device gets a health run when, and what follows from its result.

Health runs do not queue: they take a device that nobody else wants. A device that is not GOOD is the exception. After a fault,
the health run occupies the device while the failed attempt still does, so that the next job does not meet the same fault; and
nothing else runs on a quarantined device anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import structlog

from etfarm.server.devices.bundles import Bundles
from etfarm.server.devices.health import standing
from etfarm.server.devices.health.book import HealthBook
from etfarm.server.devices.registry import Registry
from etfarm.server.devices.runners import known_runner
from etfarm.server.jobs.cells.device_attempts import DeviceAttempts
from etfarm.server.jobs.health import program
from etfarm.server.jobs.health.run import HealthRunAborted, HealthRuns
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1.device_pb2 import Device, DeviceState, HealthEvent, HealthRunTrigger
from etfarm.wire.errors import DeviceError, EtfarmError, error_for
from etfarm.wire.shielding import end_tasks

log = structlog.get_logger()

MAX_RUNS: Final = 8
"""Maximum number of health runs at the same time, besides those that somebody asked for and those after faults."""

_IDLE: Final = DeviceState.DEVICE_STATE_IDLE
_DRAINING: Final = DeviceState.DEVICE_STATE_DRAINING

_MEASURED: Final = frozenset({standing.ENROLMENT, standing.PERIODIC, standing.REQUEST})
"""Triggers of health runs that measure. The others only check the outputs, so that the device is free again at once."""
_PATIENT: Final = frozenset({standing.ENROLMENT, standing.PERIODIC})
"""Triggers of health runs that give way to everything else."""


@dataclass(frozen=True)
class Pauses:
    """Intervals at which devices are looked at, and time limits of health runs, in seconds."""

    soon_s: float = 0.2
    """Minimum time between two looks at all devices: many may change at once."""
    later_s: float = 5.0
    """Maximum time between two looks at all devices, and minimum between two looks at one that was not free."""
    busy_s: float = 600.0
    """Maximum time until a health run begins: for what the device runs, and for the server's compilations if they share a
    machine."""
    patient_s: float = 5.0
    """The same for one that gives way to everything else."""
    aborted_s: float = 60.0
    """Time until a health run that came to no result is repeated; a user's job may have needed the device."""


class Probing:
    """The tasks of the health runs in progress, and the task that starts them when they are due."""

    def __init__(
        self,
        registry: Registry,
        book: HealthBook,
        bundles: Bundles,
        attempts: DeviceAttempts,
        runs: HealthRuns,
        measurement_lock: MeasurementLock,
        now: Callable[[], datetime],
        pauses: Pauses | None = None,
    ) -> None:
        self._pauses = pauses or Pauses()
        self._registry = registry
        self._book = book
        self._bundles = bundles
        self._attempts = attempts
        self._runs = runs
        self._measurement_lock = measurement_lock
        self._now = now
        self._tasks: dict[str, asyncio.Task[HealthEvent]] = {}
        """Health runs in progress, by device id."""
        self._scheduled: set[str] = set()
        """Devices whose health run in progress was due."""
        self._not_before_s: dict[str, float] = {}
        """When a health run that came to no result may be repeated, by the event loop's clock and by device id."""
        self._is_draining = False
        self._wake = asyncio.Event()
        registry.on_change(self._wake.set)
        book.on_change(registry.changed)
        book.on_fault(self._probe_after_fault)

    async def run(self) -> None:
        """Start the health runs that are due, until the task is cancelled; then end those in progress."""
        try:
            while True:
                pause_s = self._pauses.later_s
                try:
                    await self._book.settle()
                    pause_s = self._start_due()
                except Exception:
                    log.exception("health runs could not be started")
                await asyncio.sleep(self._pauses.soon_s)
                try:
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                except TimeoutError:
                    pass  # devices become free, and runs due, without a change of the registry
                self._wake.clear()
        finally:
            await self.drain()

    async def drain(self) -> None:
        """Start no health runs any more, and end those in progress: the next server repeats what was due."""
        self._is_draining = True
        await end_tasks(*self._tasks.values())

    async def check(self, device: Device, *, caller: str, is_admin: bool) -> HealthEvent:
        """Run a health run on a device as soon as what it runs has ended, and return its event.

        Args:
            device: the device, as the caller sees it.
            caller: name of the caller, who may have reserved the device.
            is_admin: whether the device may be drained, or reserved by others.

        Raises:
            HEALTH_RUN_IMPOSSIBLE: the device can run none now.
            HealthRunAborted: it came to no result.
        """
        why = self._why_impossible(device)
        if why is None and not is_admin and device.HasField("drain"):
            why = "is drained"
        if why is None and not is_admin and device.HasField("reservation") and device.reservation.owner != caller:
            why = f"is reserved by {device.reservation.owner or 'another project'}"
        if why is None and device.id in self._tasks and device.id not in self._scheduled:
            why = "is in a health run already"
        if why is not None:
            raise error_for(
                "HEALTH_RUN_IMPOSSIBLE", f"{device.name} {why}.", f"See `etfarm devices show {device.id}`.", device=device.id
            )
        if self._is_draining:
            raise _stopping(device)
        if (due := self._tasks.get(device.id)) is not None:
            # Nobody has asked for it, and it may wait for minutes until the device is cool.
            due.cancel()
            await asyncio.wait({due})
            return await self.check(self._registry.get(device.id), caller=caller, is_admin=is_admin)
        task = self._start(device, standing.REQUEST)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_draining:
                raise _stopping(device) from None
            raise
        finally:
            # Also if the caller has gone.
            task.cancel()

    def _start_due(self) -> float:
        """Start the health runs that are due; return the seconds until the next look."""
        pause_s = self._pauses.later_s
        at, now_s = self._now(), asyncio.get_running_loop().time()
        self._not_before_s = {each: not_before_s for each, not_before_s in self._not_before_s.items() if not_before_s > now_s}
        for device_id in self._registry.connected():
            if self._is_draining or len(self._scheduled) >= MAX_RUNS:
                break
            if device_id in self._tasks or device_id in self._not_before_s:
                continue
            due = standing.due(self._book.of(device_id), self._book.policy)
            if due is None:
                continue
            if due[0] > at:
                pause_s = min(pause_s, (due[0] - at).total_seconds())
                continue
            device = self._registry.get(device_id)
            if self._may_start(device, due[1]):
                self._scheduled.add(device_id)
                self._start(device, due[1])
            else:
                self._not_before_s[device_id] = now_s + self._pauses.later_s
        return pause_s

    def _may_start(self, device: Device, trigger: HealthRunTrigger.ValueType) -> bool:
        """Return whether a health run that is due may start now."""
        if self._why_impossible(device) is not None or device.attempt_id:
            return False
        if trigger == standing.PROBE:
            return device.state in (_IDLE, _DRAINING)
        if device.state != _IDLE or device.HasField("reservation"):
            return False
        return trigger not in _PATIENT or self._is_idle(device)

    def _is_idle(self, device: Device) -> bool:
        """Return whether a device runs nothing, nobody wants it, and no work of the server would disturb a measurement on it."""
        if device.state != _IDLE or device.HasField("reservation") or self._attempts.is_wanted(device):
            return False
        return device.emulated or not self._registry.is_on_this_machine(device.id) or self._measurement_lock.is_free

    def _why_impossible(self, device: Device) -> str | None:
        """Return why a device can run no health program now; None if it can."""
        if not self._registry.is_connected(device.id):
            return "is offline"
        if device.HasField("problem"):
            return "cannot run programs now"
        runner = known_runner(self._bundles, device)
        if runner is None:
            return "has no runner yet"
        return "has a runner that lacks what the health program needs" if program.choose(runner) is None else None

    def _probe_after_fault(self, device_id: str) -> None:
        """Occupy a device for a health run while the attempt that failed still does."""
        is_off = self._is_draining or not self._book.policy.interval_s
        if is_off or device_id in self._tasks or not self._registry.is_connected(device_id):
            return
        device = self._registry.get(device_id)
        is_quarantined = self._book.of(device_id).state == standing.QUARANTINED
        is_kept = device.HasField("drain") or device.HasField("reservation")
        if self._why_impossible(device) is None and not is_kept and not is_quarantined:
            self._start(device, standing.AFTER_FAULT)

    def _start(self, device: Device, trigger: HealthRunTrigger.ValueType) -> asyncio.Task[HealthEvent]:
        is_idle = self._is_idle(device)
        attempt_id = self._attempts.occupy(device.id, lambda _: None)
        work = self._probe(device, attempt_id, trigger, is_idle=is_idle)
        task = asyncio.create_task(work, name=f"health-{device.id}")
        self._tasks[device.id] = task
        task.add_done_callback(lambda done: self._forget(device.id, attempt_id, done))
        return task

    def _forget(self, device_id: str, attempt_id: str, task: asyncio.Task[HealthEvent]) -> None:
        # A task that was cancelled before its first step has freed nothing.
        self._free(attempt_id, device_id)
        if self._tasks.get(device_id) is task:
            del self._tasks[device_id]
            self._scheduled.discard(device_id)
        self._wake.set()
        error = None if task.cancelled() else task.exception()
        if not task.cancelled() and error is None:
            self._not_before_s.pop(device_id, None)
            return
        self._not_before_s[device_id] = asyncio.get_running_loop().time() + self._pauses.aborted_s
        if isinstance(error, EtfarmError):
            log.info("a health run came to no result", device=device_id, why=error.message)
        elif error is not None:
            log.error("a health run failed because of a bug", device=device_id, exc_info=error)

    async def _probe(self, device: Device, attempt_id: str, trigger: HealthRunTrigger.ValueType, *, is_idle: bool) -> HealthEvent:
        """Lead a health run, and record its result before the device is free.

        Args:
            is_idle: whether the device was idle before.
        """
        is_patient = trigger in _PATIENT

        def is_still_idle() -> bool:
            nonlocal is_idle
            is_quiet_wanted = self._registry.is_on_this_machine(device.id) and self._measurement_lock.is_wanted
            is_idle = is_idle and not is_quiet_wanted and not self._attempts.is_wanted(device)
            return is_idle

        def is_wanted() -> bool:
            return not is_still_idle() and is_patient

        wait_s = self._pauses.patient_s if is_patient else self._pauses.busy_s
        try:
            outcome = await self._runs.run(
                device, attempt_id, trigger, is_measured=trigger in _MEASURED, is_wanted=is_wanted, wait_s=wait_s
            )
        except HealthRunAborted:
            raise
        except DeviceError as lost:
            await self._book.record_fault(device.id, lost, attempt_id=attempt_id)
            raise HealthRunAborted(lost.message, lost.remedy, device=device.id) from lost
        return await self._book.record_run(
            device.id, outcome.run, outcome.error, outcome.series, attempt_id, was_idle=is_still_idle()
        )

    def _free(self, attempt_id: str, device_id: str) -> None:
        if self._attempts.has_answer(attempt_id):
            self._attempts.acknowledge(attempt_id, device_id)
        elif self._attempts.is_live(attempt_id):
            self._attempts.cancel(attempt_id, device_id, "the health run is over")


def _stopping(device: Device) -> HealthRunAborted:
    return HealthRunAborted("The server is about to stop.", "Try again once it has started again.", device=device.id)
