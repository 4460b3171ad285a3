"""A placement of one cell, or of several that are measured in turns: from waiting for a device to what the device gave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

import structlog

from etfarm.server.jobs import model
from etfarm.server.jobs.cells.cell_run import Steps, Way
from etfarm.server.jobs.cells.execution import Execution
from etfarm.server.jobs.records.log import JobLog
from etfarm.server.reports.assembly import since
from etfarm.server.workers.measurement_lock import MeasurementLock
from etfarm.v1.job_pb2 import Progress
from etfarm.wire.errors import EtfarmError, Fault
from etfarm.wire.status import from_proto, to_proto

log = structlog.get_logger()

MAX_ATTEMPTS: Final = 3
"""Attempts of a cell: the first, and two more after device faults."""


class Attempts:
    """Takes ways through attempts.

    Args:
        progress: told (job id, progress).
    """

    def __init__(
        self,
        steps: Steps,
        execution: Execution,
        joblog: JobLog,
        quiet: MeasurementLock,
        progress: Callable[[str, Progress], None],
        *,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        self._steps = steps
        self._execution = execution
        self._joblog = joblog
        self._quiet = quiet
        self._progress = progress
        self._now = now
        self._clock = clock

    async def run(self, ways: Sequence[Way]) -> dict[str, EtfarmError]:
        """One attempt of ways that are all WAITING, or all RUNNING in it since before this server.

        Those that ran are ANALYZING then; all of them are WAITING again where the device was to blame.

        Returns:
            Why the others are over, by cell.
        """
        is_new = ways[0].cell.state == model.WAITING
        over: dict[str, EtfarmError] = {}
        if is_new:
            over |= self._execution.lacking(ways)
            ways = _without(ways, over)
            if not ways:
                return over
            await self._execution.set_room_aside(ways, self._progress)
        try:
            return over | await self._attempt(ways, is_new=is_new)
        finally:
            self._execution.give_room_back(ways)

    async def _attempt(self, ways: Sequence[Way], *, is_new: bool) -> dict[str, EtfarmError]:
        """Placing, sending, receiving; why those are over that do not go on, by cell."""
        if is_new:
            await self._place(ways)
        else:
            for way in ways:
                way.device = self._execution.device_of(way.cell)
            self._execution.permit(ways)
        errors: dict[str, EtfarmError] = {}
        try:
            async with self._quiet_for(ways):
                if is_new:
                    errors |= await self._send(ways)
                errors |= await self._receive(_without(ways, errors))
        except EtfarmError as raised:
            errors = {way.cell.id: raised for way in ways} | errors
        return await self._conclude(ways, errors)

    async def _conclude(self, ways: Sequence[Way], errors: dict[str, EtfarmError]) -> dict[str, EtfarmError]:
        """Those that ran go on, and after a device fault all but those that are over by a fault of their own; gives these."""
        for way in ways:
            attempt = way.cell.attempts[-1]
            attempt.finished_at.FromDatetime(self._now())
            if way.cell.id in errors:
                attempt.error.CopyFrom(to_proto(errors[way.cell.id]))
        faults = [error for error in errors.values() if error.fault is Fault.DEVICE]
        is_again = bool(faults) and max(len(way.cell.attempts) for way in ways) < MAX_ATTEMPTS
        over = {cell_id: error for cell_id, error in errors.items() if not (is_again and error.fault is Fault.DEVICE)}
        going = _without(ways, over)
        for way in going if is_again else ():
            log.warning("placing a cell again", cell=way.cell.id, device=way.cell.attempts[-1].device_id, error=str(faults[0]))
            self._joblog.add(way.job.id, way.cell.id, "FARM", f"placed again after a device fault: {faults[0]}")
        if going:
            await self._steps.advance(going, model.WAITING if is_again else model.ANALYZING)
        for way in going:
            self._execution.end(way.cell)
        return over

    async def _place(self, ways: Sequence[Way]) -> None:
        job = ways[0].job
        start_ms, started = since(job, self._now()), self._clock()
        for way in ways:
            # What an earlier attempt gave is not this one's.
            way.result, way.sent_ms = None, 0.0
            way.cell.ClearField("outputs")
        device, attempt = await self._execution.place(ways, self._progress, self._joblog.add)
        attempt.started_at.FromDatetime(self._now())
        for way in ways:
            way.device = device
            way.cell.attempts.append(attempt)
        self._time(ways, "WAIT_FOR_DEVICE", start_ms, started)
        await self._steps.advance(ways, model.RUNNING)

    @asynccontextmanager
    async def _quiet_for(self, ways: Sequence[Way]) -> AsyncIterator[None]:
        """Nothing else works here while a device on this machine measures. An emulated one works: its times mean nothing."""
        job, device = ways[0].job, ways[0].device
        assert device is not None
        if not (job.spec.HasField("measurement") and self._execution.is_on_this_machine(device)):
            yield
            return
        self._tell(ways, "WAIT_FOR_QUIET")
        start_ms, started = since(job, self._now()), self._clock()
        async with self._quiet.work() if device.emulated else self._quiet.measure():
            self._time(ways, "WAIT_FOR_QUIET", start_ms, started)
            yield

    async def _send(self, ways: Sequence[Way]) -> dict[str, EtfarmError]:
        """Sends the attempt; gives the errors of cells that the device cannot run, which were not sent."""
        if starting := self._execution.starting:
            self._tell(ways, "BUNDLE", starting)
        errors = await self._execution.start(ways)
        for way in ways:
            way.sent_ms = since(way.job, self._now())
        return errors

    async def _receive(self, ways: Sequence[Way]) -> dict[str, EtfarmError]:
        """Fills the results; gives the errors that the device reports of cells."""
        if not ways:
            return {}
        results, errors = await self._execution.results(ways), {}
        for way in ways:
            cell, result = way.cell, results[way.cell.id]
            if isinstance(result, EtfarmError):
                errors[cell.id] = result
                continue
            way.result = result
            # An attempt that an earlier server sent: its placing is the nearest that is known.
            sent_ms = way.sent_ms or since(way.job, cell.attempts[-1].started_at.ToDatetime(UTC))
            for phase in result.phases:
                begun_ms = sent_ms + phase.start_ms
                cell.timeline.add(actor="DEVICE", phase=phase.phase, start_ms=begun_ms, duration_ms=phase.duration_ms)
            if result.HasField("outputs"):
                cell.outputs.CopyFrom(result.outputs)
            if result.HasField("error"):
                errors[cell.id] = from_proto(result.error)
        return errors

    def _tell(self, ways: Sequence[Way], phase: str, message: str = "") -> None:
        for way in ways:
            self._progress(way.job.id, Progress(cell_id=way.cell.id, actor="SERVER", phase=phase, message=message))

    def _time(self, ways: Sequence[Way], phase: str, start_ms: float, started: float) -> None:
        duration_ms = (self._clock() - started) * 1e3
        for way in ways:
            way.cell.timeline.add(actor="SERVER", phase=phase, start_ms=start_ms, duration_ms=duration_ms)


def _without(ways: Sequence[Way], these: dict[str, EtfarmError]) -> list[Way]:
    return [way for way in ways if way.cell.id not in these]
