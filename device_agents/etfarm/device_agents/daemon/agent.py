"""The device's side of every connection: who this agent is, which attempt runs, and which results the server still lacks."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import hashlib
import logging
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import IO

from etfarm.device_agents.attempts.attempt import Attempt
from etfarm.device_agents.attempts.cache import Cache
from etfarm.device_agents.attempts.interleaved import InterleavedAttempt
from etfarm.device_agents.attempts.session import ServedSession
from etfarm.device_agents.config import AgentConfig
from etfarm.device_agents.errors import AgentFailed, Cancelled, DeviceBusy, DeviceGone, FolderInUse, FolderUnusable, WrongDevice
from etfarm.device_agents.runners.errors import DeviceStorageFailed
from etfarm.device_agents.targets.base import Target
from etfarm.v1 import agent_pb2, common_pb2, device_pb2
from etfarm.wire.atomic_write import write_atomically
from etfarm.wire.errors import EtfarmError
from etfarm.wire.status import to_proto

log = logging.getLogger(__name__)

_MACHINE_ID = re.compile(r"[0-9a-f]{32}")
"""Source: machine-id(5)."""


Tell = Callable[[agent_pb2.AgentMessage], None]
"""Takes a message for the server; drops it while there is no connection."""


def failed(start: agent_pb2.StartRun, error: EtfarmError) -> agent_pb2.RunResult:
    """The result of an attempt that failed as a whole."""
    told = to_proto(error)
    return agent_pb2.RunResult(
        attempt_id=start.attempt_id,
        device_id=start.device_id,
        candidates=[agent_pb2.CandidateResult(cell_id=candidate.cell_id, error=told) for candidate in start.candidates],
        error=told,
    )


class DataFolder:
    """The agent's data folder, for one agent at a time: its lock, the agent's id, results that wait.

    Raises:
        FolderInUse: another process holds it.
        FolderUnusable: nothing can be written there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Other users, runners above all, must not read results, the cache or the agent's identity.
            with contextlib.suppress(PermissionError):  # another user's folder that this agent may write
                path.chmod(0o700)
            self._lock: IO[str] = (path / "lock").open("a+")
        except OSError as error:
            raise FolderUnusable(path, error.strerror or str(error)) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise FolderInUse(
                f"Another agent works in {path}.", "Stop it, or give this one a folder of its own with --data.", folder=path
            ) from None
        # Work folders of runs that ended with an earlier process.
        shutil.rmtree(self.runs, ignore_errors=True)

    @property
    def runs(self) -> Path:
        """Work folders of runs."""
        return self.path / "runs"

    def agent_id(self) -> str:
        """The agent's UUID, made at the first call ever."""
        path = self.path / "agent_id"
        if path.exists():
            try:
                return str(uuid.UUID(path.read_text().strip()))
            except ValueError:
                log.warning("%s holds no UUID; this agent gets a new id", path)
        agent_id = str(uuid.uuid4())
        try:
            write_atomically(path, f"{agent_id}\n".encode(), durable=True)
        except OSError as error:
            raise FolderUnusable(self.path, error.strerror or str(error)) from None
        return agent_id

    def close(self) -> None:
        """Gives the folder free."""
        self._lock.close()


class Results:
    """Results that the server has not acknowledged: in memory, and as files that outlive the agent and a power cut.

    Args:
        folder: a file for each: the sha256 of a serialized RunResult, and it. What does not fit is deleted at the start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, agent_pb2.RunResult] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            result = _result_in(path)
            if result is not None:
                self._waiting[result.attempt_id] = result

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._waiting

    @property
    def waiting(self) -> Mapping[str, agent_pb2.RunResult]:
        """By attempt, in the order they came."""
        return self._waiting

    async def put(self, result: agent_pb2.RunResult) -> None:
        """Keeps a result. A disk that takes no file is logged: the result then lives as long as this process."""
        self._waiting[result.attempt_id] = result
        try:
            told = result.SerializeToString()
            await asyncio.to_thread(
                write_atomically, self._path(result.attempt_id), hashlib.sha256(told).digest() + told, durable=True
            )
        except OSError as error:
            log.error("the result of attempt %s cannot be written: %s", result.attempt_id, error)

    def drop(self, attempt_id: str) -> None:
        """Forgets a result; harmless where there is none."""
        if self._waiting.pop(attempt_id, None) is not None:
            self._path(attempt_id).unlink(missing_ok=True)

    def _path(self, attempt_id: str) -> Path:
        # The id is the server's word and no file name.
        return self._folder / f"{hashlib.sha256(attempt_id.encode()).hexdigest()[:32]}.result"


def _result_in(path: Path) -> agent_pb2.RunResult | None:
    """The result that an earlier process kept there; None, and the file deleted, where it is not whole.

    A message that is cut may well be a message, and an empty file is one: the digest tells.
    """
    try:
        kept = path.read_bytes()
        if path.suffix == ".result" and hashlib.sha256(kept[32:]).digest() == kept[:32]:
            return agent_pb2.RunResult.FromString(kept[32:])
        log.warning("%s is no whole result and is deleted", path)
        path.unlink()
    except OSError as error:
        log.warning("%s cannot be read: %s", path, error)
    return None


def device_id(machine_id: str, agent_id: str, *, is_default_folder: bool) -> str:
    """The device's id, 16 hex digits: the machine's, so that it outlives a reinstallation of the agent.

    Agents with data folders of their own on one machine are devices of their own, or the second would take the first one's
    place; so theirs is of the machine and the agent together. Without a machine id the agent's id is the device's;
    what an image has before its first start ("uninitialized"), or after a power cut, is none: other machines have it too.
    """
    if not _MACHINE_ID.fullmatch(machine_id):
        return agent_id
    # As machine-id(5) asks for: the id itself stays here, a hash with our name goes out.
    text = f"{machine_id} etfarm" if is_default_folder else f"{machine_id} etfarm {agent_id}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def emulated_id(agent_id: str, arch: str, cpu: str) -> str:
    """The id of an emulated device, 16 hex digits: it is the agent's and the processor's, and no machine's."""
    return hashlib.sha256(f"{agent_id} etfarm {arch} {cpu}".encode()).hexdigest()[:16]


class Agent:
    """Runs what the server asks for, one attempt at a time on each device, whether or not there is a connection meanwhile.

    Args:
        config: the agent's.
        folder: the data folder.
        cache: of artifacts.
        tell: takes messages for the server.
    """

    def __init__(self, config: AgentConfig, folder: DataFolder, cache: Cache, tell: Tell) -> None:
        self.results = Results(folder.path / "results")
        self._config = config
        self._runs = folder.runs
        self._cache = cache
        self._tell = tell
        self._targets: dict[str, Target] = {}
        self._problems: dict[str, device_pb2.Device] = {}
        """Devices that can be given nothing, by id."""
        self._attempts: dict[str, Attempt | ServedSession] = {}
        """What runs, by device."""
        self._places: dict[str, str] = {}
        """Devices, by attempt that has not ended."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, EtfarmError] = {}
        """What attempts that are being ended end with."""
        self._done: deque[str] = deque(maxlen=1000)
        self._closing = False

    @property
    def devices(self) -> list[device_pb2.Device]:
        """The agent's devices as they are now, by id; those that can be given nothing have a `problem`."""
        known = self._problems | {device_id: target.device for device_id, target in self._targets.items()}
        return [known[device_id] for device_id in sorted(known)]

    def attach(self, target: Target) -> None:
        """A device came, or can be given runs again, or is known better."""
        device = target.device
        self._targets[device.id] = target
        self._problems.pop(device.id, None)
        self._tell(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=device)))

    async def trouble(self, device: device_pb2.Device) -> None:
        """A device is there and can be given nothing: it has a `problem`. What runs on it has ended afterwards; see `detach`."""
        await self._end_runs(device.id, device.problem.message)
        if self._problems.get(device.id) == device:
            return
        self._problems[device.id] = device
        self._tell(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=device)))

    async def detach(self, device_id: str, reason: str) -> None:
        """A device went. What runs on it has ended afterwards: it fails by the device, unless all that it gave is here already
        and is sent first. Harmless where the device is gone."""
        if device_id not in self._targets and device_id not in self._problems:
            return
        try:
            await self._end_runs(device_id, reason)
        finally:
            # Whoever is tired of waiting for runs must not keep this from the farm.
            self._problems.pop(device_id, None)
            self._tell(agent_pb2.AgentMessage(device_gone=agent_pb2.DeviceGone(device_id=device_id, reason=reason)))

    def telemetry(self) -> dict[str, device_pb2.DeviceTelemetry]:
        """For a heartbeat, by device. While anything is timed here, only what costs little."""
        light = any(attempt.timing for attempt in self._attempts.values())
        return {device_id: target.telemetry(light=light) for device_id, target in self._targets.items()}

    @property
    def active(self) -> list[str]:
        """Attempts that run now, those included whose result is being written down."""
        return list(self._tasks)

    def start(self, start: agent_pb2.StartRun) -> None:
        """Begins an attempt, or answers why not. One that is known already stays as it is."""
        attempt_id = start.attempt_id
        if attempt_id in self._tasks or attempt_id in self.results or attempt_id in self._done:
            log.info("attempt %s is known already", attempt_id)
            return
        target, former = self._targets.get(start.device_id), self._attempts.get(start.device_id)
        if target is None:
            refusal: EtfarmError = WrongDevice(f"This agent has no device {start.device_id}.", device_id=start.device_id)
            self._spawn(attempt_id, self._finish(failed(start, refusal)))
            return
        if former is not None and (busy_with := former.start.attempt_id) not in self._cancelled:
            refusal = DeviceBusy(f"{target.device.name} is busy with attempt {busy_with}.", busy_with=busy_with)
            self._spawn(attempt_id, self._finish(failed(start, refusal)))
            return
        log.info("attempt %s begins", attempt_id)
        folder = self._runs / hashlib.sha256(attempt_id.encode()).hexdigest()[:32]
        # One that was cancelled just now needs a moment to end; the server need not know.
        ending = None if former is None else self._tasks.get(former.start.attempt_id)
        attempt = _kind_of(start)(self._config, target, self._cache, folder, start, self._progress)
        self._attempts[start.device_id] = attempt
        self._places[attempt_id] = start.device_id
        self._spawn(attempt_id, self._run(attempt, ending))

    def cancel(self, attempt_id: str, reason: str) -> None:
        """Ends an attempt; its runner is killed at once. A result that waits is of no use any more."""
        if attempt_id in self.results:
            self.acknowledge(attempt_id)
        elif (task := self._tasks.get(attempt_id)) is not None and attempt_id not in self._cancelled:
            self._cancelled[attempt_id] = Cancelled(f"The attempt was cancelled: {reason or 'no reason was given'}.", why=reason)
            task.cancel()

    def acknowledge(self, attempt_id: str) -> None:
        """Forgets a result, since the server has it."""
        self.results.drop(attempt_id)
        self._done.append(attempt_id)

    async def close(self) -> None:
        """Ends what runs, runners included."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_runs(self, device_id: str, reason: str) -> None:
        """No new attempt on the device; those that run fail by it, but for one whose files are all here."""
        target = self._targets.pop(device_id, None)
        if target is None:
            return
        attempt, gone = self._attempts.get(device_id), DeviceGone(target.device.name, reason)
        running = "" if attempt is None else attempt.start.attempt_id
        if attempt is not None and not attempt.needs_target:
            # Nothing is to be placed there while the rest of it is sent.
            leaving = device_pb2.Device(problem=to_proto(gone))
            leaving.MergeFrom(target.device)
            self._problems[device_id] = leaving
            self._tell(agent_pb2.AgentMessage(device_update=agent_pb2.DeviceUpdate(device=leaving)))
        elif (task := self._tasks.get(running)) is not None and running not in self._cancelled:
            self._cancelled[running] = gone
            task.cancel()
        # Results that are being written down, too: the server does not hear of one once the device is gone.
        ending = {self._tasks[attempt_id] for attempt_id, place in self._places.items() if place == device_id}
        if ending := ending - {asyncio.current_task()}:
            await asyncio.wait(ending)

    def _spawn(self, attempt_id: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"attempt {attempt_id}")
        self._tasks[attempt_id] = task
        task.add_done_callback(lambda _: (self._tasks.pop(attempt_id, None), self._places.pop(attempt_id, None)))

    async def _run(self, attempt: Attempt | ServedSession, ending: asyncio.Task[None] | None) -> None:
        """An attempt from its begin, after `ending`, to its result; whatever happens, the device is free afterwards."""
        start = attempt.start
        try:
            if ending is not None:
                await asyncio.wait({ending})
            result = await attempt.run()
        except asyncio.CancelledError:
            error = self._cancelled.pop(start.attempt_id, None)
            if error is None or self._closing:
                raise
            task = asyncio.current_task()
            assert task is not None  # this is one
            task.uncancel()
            result = failed(start, error)
        except EtfarmError as raised:
            result = failed(start, raised)
        except OSError as raised:
            log.error("attempt %s: %s", start.attempt_id, raised)
            result = failed(start, DeviceStorageFailed(attempt.phase, str(raised)))
        except Exception as raised:
            log.exception("attempt %s failed by a bug", start.attempt_id)
            result = failed(start, AgentFailed(f"The agent failed: {type(raised).__name__}: {raised}."))
        finally:
            if self._attempts.get(start.device_id) is attempt:
                del self._attempts[start.device_id]
        if _is_the_devices(result) and not await attempt.target.answers():
            # First, or the farm would place the run on it again.
            await self.detach(start.device_id, "it does not answer")
        await self._finish(result)

    async def _finish(self, result: agent_pb2.RunResult) -> None:
        """Keeps a result, then sends it; without a connection it goes out when there is one again."""
        errors = [result.error.reason] if result.HasField("error") else [c.error.reason for c in result.candidates]
        log.info("attempt %s ended: %s", result.attempt_id, ", ".join(reason or "ok" for reason in errors) or "nothing to run")
        await self.results.put(result)
        self._tell(agent_pb2.AgentMessage(run_result=result))
        _give_memory_back()

    def _progress(self, progress: agent_pb2.RunProgress) -> None:
        self._tell(agent_pb2.AgentMessage(run_progress=progress))


def _is_the_devices(result: agent_pb2.RunResult) -> bool:
    """Whether the device is to blame for how the attempt ended."""
    told = [result.error, *(candidate.error for candidate in result.candidates)]
    return any(error.fault == common_pb2.FAULT_DEVICE for error in told)


def _kind_of(start: agent_pb2.StartRun) -> type[Attempt | ServedSession]:
    if start.HasField("session"):
        return ServedSession
    # One that is left of several has nobody to take turns with.
    return InterleavedAttempt if start.measurement.interleave and len(start.candidates) > 1 else Attempt


def _give_memory_back() -> None:
    """Returns to the system what transfers left in malloc's arenas, 4 MB or so, which glibc would keep for good."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
