"""Attempts: the placement of one cell, or of several interleaved ones, up to the device's results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final, Protocol

import structlog

from etfarm.server.artifacts.errors import ArtifactDamaged
from etfarm.server.devices.errors import DeviceOffline
from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import CellRun
from etfarm.server.jobs.cells.dispatch import Dispatch
from etfarm.server.jobs.cells.progress import CellProgress, PhaseTimer
from etfarm.server.jobs.cells.requirements import Requirements
from etfarm.server.jobs.cells.results import Results
from etfarm.server.jobs.cells.transitions import CellTransitions
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.jobs.takeups import Hands
from etfarm.server.reports.assembly import since
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1 import agent_pb2, common_pb2
from etfarm.v1.common_pb2 import LogSource
from etfarm.wire.errors import EtfarmError, Fault
from etfarm.wire.status import from_proto, to_proto

log = structlog.get_logger()

MAX_ATTEMPTS: Final = 3
"""Maximum number of attempts of a cell: the first, and two more after device faults."""

MAX_UNSENT: Final = 100
"""Maximum number of attempts of a cell whose devices went offline before an attempt could be sent."""


class OnDeviceFault(Protocol):
    """A function that records the fault with which an attempt ended, while the attempt still occupies its device."""

    async def __call__(self, device_id: str, error: EtfarmError, *, attempt_id: str, project: str) -> None:
        """Record the fault."""


class Attempts:
    """The sequence of steps of an attempt: place, send, receive, check, conclude.

    Args:
        compile_again: compiles a cell whose program is damaged or lost where it is stored.
    """

    def __init__(
        self,
        transitions: CellTransitions,
        requirements: Requirements,
        dispatch: Dispatch,
        results: Results,
        joblog: JobLog,
        measurement_lock: MeasurementLock,
        progress: CellProgress,
        timer: PhaseTimer,
        hands: Hands,
        *,
        now: Callable[[], datetime],
        on_device_fault: OnDeviceFault,
        compile_again: Callable[[CellRun], Awaitable[None]],
    ) -> None:
        self._compile_again = compile_again
        self._on_device_fault = on_device_fault
        self._transitions = transitions
        self._requirements = requirements
        self._dispatch = dispatch
        self._results = results
        self._joblog = joblog
        self._measurement_lock = measurement_lock
        self._progress = progress
        self._timer = timer
        self._hands = hands
        self._now = now

    async def run(self, cell_runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        """Lead cells through one attempt. All are WAITING, or RUNNING in an attempt of an earlier server.

        Cells that ran are ANALYZING afterwards; after a device fault, all are WAITING again.

        Returns:
            The errors, by cell id, of the cells that failed.
        """
        is_new = cell_runs[0].cell.state == model.WAITING
        failed: dict[str, EtfarmError] = {}
        if is_new:
            failed |= self._requirements.find_unsupported(cell_runs)
            cell_runs = _without(cell_runs, failed)
            if not cell_runs:
                return failed
            await self._results.reserve_room(cell_runs, partial(self._progress.announce_phase, cell_runs, "WAIT_FOR_ROOM"))
        try:
            return failed | await self._attempt(cell_runs, is_new=is_new)
        finally:
            self._results.release_room(cell_runs)

    async def _attempt(self, cell_runs: Sequence[CellRun], *, is_new: bool) -> dict[str, EtfarmError]:
        """Place, send, receive and check; return the errors, by cell id, of the cells that do not continue."""
        if is_new:
            await self._place(cell_runs)
        else:
            for run in cell_runs:
                run.device = self._dispatch.device_of(run.cell)
            self._dispatch.permit(cell_runs)
        errors: dict[str, EtfarmError] = {}
        try:
            if is_new:
                errors |= await self._replace_lost(cell_runs)
            sent = _without(cell_runs, errors)
            async with self._quiet_for(cell_runs):
                if is_new and sent:
                    errors |= await self._send(sent)
                sent = _without(sent, errors)
                answer = await self._results.receive(sent) if sent else None
            if answer is not None:
                # Not within the quiet: a suspect waits until others are compiled, which wait for the quiet to end.
                async with self._hands.hold(sent[0].job.id):
                    errors |= await self._check(answer, sent)
        except EtfarmError as raised:
            errors = {run.cell.id: raised for run in cell_runs} | errors
        return await self._conclude(cell_runs, errors)

    async def _conclude(self, cell_runs: Sequence[CellRun], errors: dict[str, EtfarmError]) -> dict[str, EtfarmError]:
        """Advance the cells that ran; after a device fault, requeue all cells except those with a fault of their own.

        Returns:
            The errors, by cell id, of the cells that do not continue.
        """
        for run in cell_runs:
            attempt = run.cell.attempts[-1]
            attempt.end_time.FromDatetime(self._now())
            if run.cell.id in errors:
                attempt.error.CopyFrom(to_proto(errors[run.cell.id]))
        faults = [error for error in errors.values() if error.fault is Fault.DEVICE]
        if faults:
            # Cells that share an attempt share its device's fault.
            job, attempt = cell_runs[0].job, cell_runs[0].cell.attempts[-1]
            await self._on_device_fault(attempt.device_id, faults[0], attempt_id=attempt.id, project=job.project)
        is_retried = bool(faults) and all(_has_attempts_left(run) for run in cell_runs)
        failed = {cell_id: error for cell_id, error in errors.items() if not (is_retried and error.fault is Fault.DEVICE)}
        continuing = _without(cell_runs, failed)
        for run in continuing if is_retried else ():
            log.warning("placing a cell again", cell=run.cell.id, device=run.cell.attempts[-1].device_id, error=str(faults[0]))
            self._joblog.add(
                run.job.id, run.cell.id, LogSource.LOG_SOURCE_FARM, f"placed again after a device fault: {faults[0]}"
            )
        if continuing:
            await self._transitions.advance(continuing, model.WAITING if is_retried else model.ANALYZING)
        for run in continuing:
            self._dispatch.end(run.cell)
        return failed

    async def _place(self, cell_runs: Sequence[CellRun]) -> None:
        phase = self._timer.start(cell_runs[0].job)
        for run in cell_runs:
            # Discard the results of an earlier attempt.
            run.result, run.sent_ms = None, 0.0
            run.cell.ClearField("outputs")
        device, attempt = await self._dispatch.place(
            cell_runs,
            self._progress.announce,
            self._joblog.add,
            partial(self._progress.announce_phase, cell_runs, "WAIT_FOR_DEVICE"),
        )
        attempt.start_time.FromDatetime(self._now())
        structlog.contextvars.bind_contextvars(attempt=attempt.id, device=device.id)
        log.info("an attempt begins", cells=len(cell_runs), device_name=device.name)
        for run in cell_runs:
            run.device = device
            run.cell.attempts.append(attempt)
        phase.record("WAIT_FOR_DEVICE", *cell_runs)
        await self._transitions.advance(cell_runs, model.RUNNING)

    async def _replace_lost(self, cell_runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        """Compile the cells again whose programs the store has lost while they waited; return the errors of those that cannot."""
        errors: dict[str, EtfarmError] = {}
        for run in cell_runs:
            if not (lost := await self._dispatch.find_lost(run)):
                continue
            log.warning("a cell is compiled again: the store has lost what its device needs", cell=run.cell.id, digests=lost)
            try:
                await self._compile_again(run)
                if lost := await self._dispatch.find_lost(run):
                    raise ArtifactDamaged(lost[0])
            except EtfarmError as error:
                errors[run.cell.id] = error
        return errors

    @asynccontextmanager
    async def _quiet_for(self, cell_runs: Sequence[CellRun]) -> AsyncIterator[None]:
        """Keep the server quiet while a device on this machine measures.

        An emulated device counts as work, since its times are not meaningful.
        """
        job, device = cell_runs[0].job, cell_runs[0].device
        assert device is not None
        if not (job.spec.HasField("measurement") and self._dispatch.is_on_this_machine(device)):
            yield
            return
        if starting := self._dispatch.starting:  # the work that it waits for
            self._progress.announce_phase(cell_runs, "BUNDLE", starting)
        else:
            self._progress.announce_phase(cell_runs, "WAIT_FOR_QUIET")
        phase = self._timer.start(job)
        async with self._measurement_lock.work() if device.emulated else self._measurement_lock.measure():
            phase.record("WAIT_FOR_QUIET", *cell_runs)
            yield

    async def _send(self, cell_runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        """Send the attempt; return the errors of cells that the device cannot run, which were not sent."""
        if starting := self._dispatch.starting:
            self._progress.announce_phase(cell_runs, "BUNDLE", starting)
        errors = await self._dispatch.send(cell_runs)
        for run in cell_runs:
            run.sent_ms = self._timer.since(run.job)
        return errors

    async def _check(self, answer: agent_pb2.RunResult, cell_runs: Sequence[CellRun]) -> dict[str, EtfarmError]:
        """Set the results of cells; return the errors that the device reports for cells."""
        results, errors = await self._results.check(answer, cell_runs), {}
        for run in cell_runs:
            cell, result = run.cell, results[run.cell.id]
            if isinstance(result, EtfarmError):
                errors[cell.id] = run.locate(result, repeated=True)
                continue
            run.result = result
            # If an earlier server sent the attempt, the best known time is that of its placement.
            sent_ms = run.sent_ms or since(run.job, cell.attempts[-1].start_time.ToDatetime(UTC))
            for phase in result.phases:
                start_ms = sent_ms + phase.start_ms
                cell.timeline.add(
                    actor=common_pb2.ACTOR_DEVICE, phase=phase.phase, start_ms=start_ms, duration_ms=phase.duration_ms
                )
            if result.HasField("outputs"):
                cell.outputs.CopyFrom(result.outputs)
            if result.HasField("error"):
                errors[cell.id] = run.locate(from_proto(result.error), repeated=True)
            if result.further.HasField("error"):
                result.further.error.CopyFrom(to_proto(run.locate(from_proto(result.further.error))))
            if result.calls.HasField("error") and result.calls.samples < len(run.calls):
                failed = run.calls[result.calls.samples].method
                result.calls.error.CopyFrom(to_proto(run.locate(from_proto(result.calls.error), failed)))
        return errors


def _has_attempts_left(run: CellRun) -> bool:
    unsent = sum(attempt.error.reason == DeviceOffline.reason for attempt in run.cell.attempts)
    return len(run.cell.attempts) - unsent < MAX_ATTEMPTS and unsent < MAX_UNSENT


def _without(cell_runs: Sequence[CellRun], excluded: Collection[str]) -> list[CellRun]:
    return [run for run in cell_runs if run.cell.id not in excluded]
