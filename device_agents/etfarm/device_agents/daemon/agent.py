"""The agent, with its devices, the attempts that run on them, and the results that wait for the server."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence

from etfarm.device_agents import logs
from etfarm.device_agents.attempts.attempt import Attempt
from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.attempts.generation import GenerationAttempt
from etfarm.device_agents.attempts.interleaved import InterleavedAttempt
from etfarm.device_agents.attempts.session import ServedSession
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.daemon.data_folder import DataFolder
from etfarm.device_agents.daemon.result_outbox import ResultOutbox
from etfarm.device_agents.errors import device_gone
from etfarm.device_agents.runners.errors import device_storage_failed
from etfarm.device_agents.targets.base import Target
from etfarm.v1 import agent_pb2, common_pb2, device_pb2
from etfarm.wire.errors import EtfarmError, error_for
from etfarm.wire.heap import give_memory_back
from etfarm.wire.shielding import end_tasks
from etfarm.wire.status import to_proto

log = logging.getLogger(__name__)

Send = Callable[[agent_pb2.AgentMessage], None]
"""Callback that sends a message to the server, or drops it while there is no connection."""


def failed_result(start: agent_pb2.StartRun, error: EtfarmError) -> agent_pb2.RunResult:
    """Return the result of an attempt that failed as a whole."""
    message = to_proto(error)
    return agent_pb2.RunResult(
        attempt_id=start.attempt_id,
        device_id=start.device_id,
        candidates=[agent_pb2.CandidateResult(cell_id=candidate.cell_id, error=message) for candidate in start.candidates],
        error=message,
    )


class Agent:
    """The agent's devices and attempts, which run with or without a connection.

    One attempt at a time runs on each device, or up to Device.concurrent_runs of those that neither measure nor are sessions.

    Args:
        config: the agent's settings.
        folder: the data folder.
        cache: the artifact cache.
        send: sends messages to the server.
    """

    def __init__(self, config: AgentConfig, folder: DataFolder, cache: Cache, send: Send) -> None:
        self.outbox = ResultOutbox(folder.results)
        self._config = config
        self._runs = folder.runs
        self._cache = cache
        self._send = send
        self._targets: dict[str, Target] = {}
        self._problems: dict[str, device_pb2.Device] = {}
        """Devices that are present but cannot take runs, by id."""
        self._attempts: dict[str, Attempt | ServedSession] = {}
        """Running attempts, by id."""
        self._places: dict[str, str] = {}
        """Devices of attempts that have not ended, by attempt."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, EtfarmError] = {}
        """Errors of attempts that are being ended, by attempt."""
        self._done: deque[str] = deque(maxlen=1000)
        self._closing = False

    @property
    def devices(self) -> list[device_pb2.Device]:
        """The agent's devices as they are now, sorted by id; those that cannot take runs have a `problem`."""
        known = self._problems | {device_id: target.device for device_id, target in self._targets.items()}
        return [known[device_id] for device_id in sorted(known)]

    def attach(self, target: Target) -> None:
        """Announce a device that was attached, can take runs again, or changed."""
        device = target.device
        self._targets[device.id] = target
        self._problems.pop(device.id, None)
        self._send(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=device)))

    def rename(self, device_id: str, new_id: str) -> None:
        """Give a device another id before the first connection."""
        target = self._targets.pop(device_id)
        target.device.id = new_id
        self._targets[new_id] = target

    async def mark_unusable(self, device: device_pb2.Device) -> None:
        """Announce a device that is present but cannot take runs, and end its run; see `detach`.

        Args:
            device: the device, with its `problem` set to the reason.
        """
        self._announce_problem(device)
        await self._end_runs(device.id, device.problem.message)

    async def detach(self, device_id: str, reason: str) -> None:
        """Announce that a device was detached, once its run has ended; does nothing if the device is not known.

        A run on it fails with DEVICE_GONE, unless all of its files have left the device: these are sent first.
        """
        if device_id not in self._targets and device_id not in self._problems:
            return
        try:
            if (target := self._targets.get(device_id)) is not None and self._running_on(device_id):
                leaving = device_pb2.Device(problem=to_proto(device_gone(target.device.name, reason)))
                leaving.MergeFrom(target.device)
                self._announce_problem(leaving)
            await self._end_runs(device_id, reason)
        finally:
            # Even if the caller is cancelled while runs end: the farm must be notified.
            self._problems.pop(device_id, None)
            self._send(agent_pb2.AgentMessage(device_gone=agent_pb2.DeviceGone(device_id=device_id, reason=reason)))

    def telemetry(self) -> dict[str, device_pb2.DeviceTelemetry]:
        """Return the devices' telemetry for a heartbeat, by device; only values that are cheap to read while a pass is timed."""
        light = any(attempt.timing for attempt in self._attempts.values())
        return {device_id: target.telemetry(light=light) for device_id, target in self._targets.items()}

    @property
    def active(self) -> list[str]:
        """Attempts that run now, including those whose result is being written."""
        return list(self._tasks)

    def start(self, start: agent_pb2.StartRun) -> None:
        """Begin an attempt, or answer why that is impossible. A known attempt is left unchanged."""
        attempt_id = start.attempt_id
        if attempt_id in self._tasks or attempt_id in self.outbox or attempt_id in self._done:
            log.info("attempt %s is already known", attempt_id)
            return
        target = self._targets.get(start.device_id)
        present = [attempt for attempt in self._attempts.values() if attempt.start.device_id == start.device_id]
        live = [attempt.start for attempt in present if attempt.start.attempt_id not in self._cancelled]
        if target is None:
            refusal: EtfarmError = error_for(
                "DEVICE_UNKNOWN", f"This agent has no device {start.device_id}.", device_id=start.device_id
            )
            self._spawn(start, self._finish(failed_result(start, refusal)))
            return
        if live and not _has_room(target.device, [*live, start]):
            busy_with = ", ".join(each.attempt_id for each in live)
            refusal = error_for("DEVICE_BUSY", f"{target.device.name} is busy with attempt {busy_with}.", busy_with=busy_with)
            self._spawn(start, self._finish(failed_result(start, refusal)))
            return
        folder = self._runs / hashlib.sha256(attempt_id.encode()).hexdigest()[:32]
        # A cancelled attempt needs a moment to end, which the server need not know.
        ending = {self._tasks[each.start.attempt_id] for each in present if each.start not in live}
        if not _is_exclusive(start):
            target = target.divided(_slots_of(target.device))
        attempt = _attempt_class(start)(self._config, target, self._cache, folder, start, self._progress)
        self._attempts[attempt_id] = attempt
        self._places[attempt_id] = start.device_id
        self._spawn(start, self._run(attempt, ending))

    def cancel(self, attempt_id: str, reason: str) -> None:
        """End an attempt and kill its runner at once; discard its result if that is already waiting."""
        if attempt_id in self.outbox:
            self.acknowledge(attempt_id)
        elif (task := self._tasks.get(attempt_id)) is not None and attempt_id not in self._cancelled:
            self._cancelled[attempt_id] = error_for(
                "CANCELLED", f"The attempt was cancelled: {reason or 'no reason'}.", why=reason
            )
            task.cancel()

    def acknowledge(self, attempt_id: str) -> None:
        """Discard a result that the server has."""
        self.outbox.drop(attempt_id)
        self._done.append(attempt_id)

    async def close(self) -> None:
        """End all attempts, including their runners."""
        self._closing = True
        tasks = list(self._tasks.values())
        await end_tasks(*tasks)

    async def _end_runs(self, device_id: str, reason: str) -> None:
        """Accept no new attempt on the device and end the current ones, unless all of their files have left the device.

        The device's problem must have been announced: on receipt of the attempt's failure the server places the run again, and
        would choose the same device.
        """
        target = self._targets.pop(device_id, None)
        if target is None:
            return
        for running, attempt in self._attempts.items():
            if attempt.start.device_id != device_id or not attempt.needs_target:
                continue
            task = self._tasks.get(running)
            if task is not None and task is not asyncio.current_task() and running not in self._cancelled:
                self._cancelled[running] = device_gone(target.device.name, reason)
                task.cancel()
        # Wait for results that are being written, too: the server accepts none once the device is detached.
        if ending := self._running_on(device_id):
            await asyncio.wait(ending)

    def _running_on(self, device_id: str) -> set[asyncio.Task[None]]:
        """Return the tasks of the device's attempts that have not ended, except the current task."""
        running = {self._tasks[attempt_id] for attempt_id, place in self._places.items() if place == device_id}
        return {task for task in running if task is not asyncio.current_task()}

    def _announce_problem(self, device: device_pb2.Device) -> None:
        """Announce that a device cannot take runs, unless the server knows the problem."""
        if self._problems.get(device.id) != device:
            self._problems[device.id] = device
            self._send(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=device)))

    def _spawn(self, start: agent_pb2.StartRun, work: Coroutine[None, None, None]) -> None:
        attempt_id, cells = start.attempt_id, ",".join(candidate.cell_id for candidate in start.candidates)
        with logs.bound(attempt=attempt_id, device=start.device_id, cell=cells):
            task = asyncio.create_task(work, name=f"attempt {attempt_id}")
        self._tasks[attempt_id] = task
        task.add_done_callback(lambda _: (self._tasks.pop(attempt_id, None), self._places.pop(attempt_id, None)))

    async def _run(self, attempt: Attempt | ServedSession, ending: Collection[asyncio.Task[None]]) -> None:
        """Run an attempt to its result, after `ending`; the device is free afterwards in any case."""
        start = attempt.start
        log.info("attempt %s begins", start.attempt_id)
        try:
            if ending:
                await asyncio.wait(ending)
            result = await attempt.run()
        except asyncio.CancelledError:
            error = self._cancelled.pop(start.attempt_id, None)
            if error is None or self._closing:
                raise
            task = asyncio.current_task()
            assert task is not None  # this method runs in a task
            task.uncancel()
            result = failed_result(start, error)
        except EtfarmError as raised:
            result = failed_result(start, raised)
        except OSError as raised:
            log.error("attempt %s: %s", start.attempt_id, raised)
            result = failed_result(start, device_storage_failed(attempt.phase, str(raised)))
        except Exception as raised:
            log.exception("attempt %s failed because of a bug", start.attempt_id)
            result = failed_result(start, error_for("AGENT_FAILED", f"The agent failed: {type(raised).__name__}: {raised}."))
        finally:
            if self._attempts.get(start.attempt_id) is attempt:
                del self._attempts[start.attempt_id]
        if _is_device_fault(result) and not await attempt.target.answers():
            # Announce this first, or the farm would place the run on the device again.
            await self.detach(start.device_id, "it does not answer")
        await self._finish(result)

    async def _finish(self, result: agent_pb2.RunResult) -> None:
        """Keep a result, then send it; without a connection it is sent after the next connect."""
        errors = [result.error.reason] if result.HasField("error") else [c.error.reason for c in result.candidates]
        log.info("attempt %s ended: %s", result.attempt_id, ", ".join(reason or "ok" for reason in errors) or "nothing to run")
        await self.outbox.put(result)
        self._send(agent_pb2.AgentMessage(run_result=result))
        give_memory_back()

    def _progress(self, progress: agent_pb2.RunProgress) -> None:
        self._send(agent_pb2.AgentMessage(run_progress=progress))


def _is_device_fault(result: agent_pb2.RunResult) -> bool:
    """Return whether the device is to blame for the end of the attempt."""
    errors = [result.error, *(candidate.error for candidate in result.candidates)]
    return any(error.fault == common_pb2.FAULT_DEVICE for error in errors)


def _is_exclusive(start: agent_pb2.StartRun) -> bool:
    """Return whether an attempt must be alone on its device."""
    return start.HasField("session") or start.HasField("measurement")


def _slots_of(device: device_pb2.Device) -> int:
    """Return the maximum number of attempts at the same time on a device, if none of them must be alone."""
    return max(1, device.concurrent_runs)


def _has_room(device: device_pb2.Device, starts: Sequence[agent_pb2.StartRun]) -> bool:
    """Return whether a device may run several attempts at the same time."""
    return len(starts) <= _slots_of(device) and not any(map(_is_exclusive, starts))


def _attempt_class(start: agent_pb2.StartRun) -> type[Attempt | ServedSession]:
    if start.HasField("session"):
        return ServedSession
    if start.candidates and all(candidate.HasField("generation") for candidate in start.candidates):
        return GenerationAttempt
    # A single candidate has no other to alternate with.
    return InterleavedAttempt if start.measurement.interleave and len(start.candidates) > 1 else Attempt
