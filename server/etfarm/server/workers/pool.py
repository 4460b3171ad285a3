"""The pool of jailed children, which limits their number, assigns folders and users, and restarts the forkserver.

Loads neither torch nor numpy. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import structlog

from etfarm.server.workers import output_files, request_files
from etfarm.server.workers.channel import attendance
from etfarm.server.workers.errors import ForkserverEnded, SupervisorKilled, WorkersDown
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.forkserver_process import ForkserverProcess, find_cgroup_place
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.isolation import Jail, JailOptions
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.limits import Limits
from etfarm.wire.sandbox import cgroups, namespaces

log = structlog.get_logger()

_POINT = "view"
"""Name of the folder that each child's root is mounted on, in the child's mount namespace."""

_DESCRIBE_S = 120.0
"""Deadline of a child that only describes its jail."""

_TRIES: Final = 3
"""Number of times that a forkserver is started for a task, which is not at fault if the kernel kills the forkserver."""

_URGENT: Final = 1
"""Number of children beyond `concurrency` that only urgent tasks may start."""


@dataclass(frozen=True)
class Finished:
    """The result of a task. Use it as an async context manager: leaving it deletes `folder`."""

    result: bytes
    """The bytes that the task returned."""
    folder: Path
    """The child's folder with the files that it wrote; move the files to keep out of it before leaving."""
    peak_rss_bytes: int
    """Maximum resident set size of the child, including pages that it shares with the forkserver."""
    cpu_s: float
    """CPU time of the child and of the processes that it waited for, in seconds."""

    async def __aenter__(self) -> Finished:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await _delete(self.folder)


class Workers:
    """A forkserver and its children, at most `concurrency` at a time and one more for urgent tasks.

    A second forkserver, for light tasks, is started when needed.

    Args:
        preload: `module` to import or `module:function` to call in the forkserver before it serves.
        light_preload: as `preload`, for the forkserver of light tasks that run while the other one is not warm. It should be
            warm within a second. None to run light tasks as all others.
        prewarm: whether `start` starts the forkserver of `preload`; otherwise the first `run` or `ready` does.
        limits: limits of each child.
        folder: existing or new folder for the children's folders; `start` deletes its contents.
        concurrency: maximum number of children at a time, without urgent ones; further callers of `run` wait for their turn.
        gate: context manager that is entered for each child's lifetime, and while `run` waits for the forkserver's warm-up.
        options: options of the children's jail. The children's folders are always hidden from each other.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str],
        limits: Limits,
        folder: Path,
        concurrency: int,
        light_preload: Sequence[str] | None = None,
        prewarm: bool = True,
        gate: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
        options: JailOptions = JailOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._preload = tuple(preload)
        self._light_preload = self._preload if light_preload is None else tuple(light_preload)
        self._limits = limits
        self._folder = folder.resolve()
        children = concurrency + _URGENT
        self._slots = FairSlots(children, reserved=_URGENT)
        self._prewarm = prewarm
        self._gate = gate
        self._is_started = False
        self._servers: dict[tuple[str, ...], ForkserverProcess] = {}
        self._network = namespaces.network_inode()
        self._options = options
        first = options.first_user
        if first is None or os.geteuid() != 0:
            first = isolation.choose_users(self._folder, children)
        self._users = [None if first is None else first + number for number in range(children)]
        self._family = f"etfarm-{hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:12]}"
        self._running: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        """Prepare the folder and start the forkserver, which warms up by itself; return within milliseconds.

        Call it in the event loop.
        """
        if (place := find_cgroup_place()) is not None:
            cgroups.remove_family(place, self._family)  # left by a server that was killed
        output_files.delete(self._folder)
        self._folder.mkdir(parents=True, mode=0o700)
        (self._folder / _POINT).mkdir(mode=0o700)
        self._is_started = True
        if self._prewarm:
            self._current(self._preload)

    @property
    def forkserver_pid(self) -> int | None:
        """The process id of the forkserver of `preload`; None before its start and after `stop`."""
        server = self._servers.get(self._preload)
        return None if server is None else server.process.pid

    async def ready(self) -> None:
        """Wait until the forkserver of `preload` is warm; start it if there is none.

        Raises:
            WorkersDown: it ended instead (ForkserverEnded), or an entry of `preload` failed; the message says which and why.
        """
        await self._ready(self._preload)

    async def _ready(self, preload: tuple[str, ...]) -> None:
        failed = await asyncio.shield(self._current(preload).warm)
        if failed:
            entry, why = next(iter(failed.items()))
            raise WorkersDown(
                f"The compile workers could not load {entry}: {why}.",
                "Install etfarm[server] completely.",
                entry=entry,
                why=why,
            )

    async def stop(self) -> None:
        """End the children, then the forkservers, and delete the folder."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._is_started = False
        while self._servers:
            _, server = self._servers.popitem()
            server.close()
            await asyncio.to_thread(server.process.wait)
        await _delete(self._folder)

    async def run(
        self,
        task: str,
        request: object,
        *,
        deadline_s: float,
        stage_deadline_s: float | None = None,
        light: bool = False,
        urgent: bool = False,
        whose: str = "",
        on_event: Callable[[bytes], None] = lambda _: None,
        on_log: Callable[[str], None] = lambda _: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> Finished:
        """Run `task` in a fresh jailed child and return its result and folder.

        Of the host's files, the child may read the system's files, the installed code, and every Path in `request`.

        Args:
            task: `module:function`; called in the child as function(request, folder, emit) -> bytes.
            request: pickled for the child; its type must be importable there.
            deadline_s: wall-clock seconds from the child's start; waiting for a slot or for warm-up does not count.
            stage_deadline_s: wall-clock seconds of each stage, and of the time before the first and after each stage; None
                for `deadline_s` only.
            light: whether the modules of `light_preload` suffice for the task, which then never waits for `preload`.
            urgent: whether the task goes before others, also while they take all other slots. No other task starts meanwhile;
                after several urgent tasks in a row, one that waits goes first.
            whose: project of the caller; projects take turns for slots.
            on_event: called with each event that the task emits, in order, on the event loop. JSON objects with `stage` and a
                `phase` of START or END name the current stage for errors, and restart the stage's clock.
            on_log: called with each line that the child, its native code and its subprocesses write to stdout or stderr.
            on_restart: called before the task starts again because the forkserver was killed, for example because the host has no
                memory left; the new child repeats the events.

        Raises:
            EtfarmError: the task raised it; its fault, reason, message, stage and metadata are kept.
            ChildDied: the child was killed by a signal or ended without an answer.
            ChildOutOfMemory: the child and its processes needed more memory than the limits allow.
            ChildDiskFull: the disk of the child's folder is full, whatever filled it.
            ChildTooManyProcesses: the child started more processes and threads than the limits allow.
            TooManyFiles: `request` names more files than can be mounted for a child.
            JailIncomplete: the host does not allow a measure, and the options require all.
            ChildTimedOut: the child or one of its stages exceeded its deadline.
            WorkersDown: the forkserver is not running, and cannot be started.

        When the caller is cancelled, the child and all of its descendants are killed before CancelledError propagates.
        """
        current = asyncio.current_task()
        assert current is not None
        self._running.add(current)
        try:
            tries = 1
            while True:
                try:
                    await self._warm_up(light)
                    async with self._slots.take(whose, urgent=urgent), self._gate():
                        return await self._run(
                            task, request, light, deadline_s=deadline_s, stage_deadline_s=stage_deadline_s, on_event=on_event,
                            on_log=on_log,
                        )  # fmt: skip
                except (ForkserverEnded, SupervisorKilled) as error:
                    if not self._is_started or tries == _TRIES:
                        raise
                    tries += 1
                    log.warning("a forkserver was killed, starting its task again", task=task, why=error.message)
                    on_restart()
        finally:
            self._running.discard(current)

    async def _run(
        self,
        task: str,
        request: object,
        light: bool,
        *,
        deadline_s: float,
        stage_deadline_s: float | None,
        on_event: Callable[[bytes], None],
        on_log: Callable[[str], None],
    ) -> Finished:
        """Run `task` once in a slot of its own; see `run`."""
        folder = Path(tempfile.mkdtemp(prefix="job-", dir=self._folder))
        user = self._users.pop()
        try:
            data = await asyncio.to_thread(_encode, request)
            ends = self._current(self._choose_preload(light)).order(task, folder, self._limits, self._jail(user))
            answer = await attendance.attend(
                task, data, ends, self._limits, deadline_s=deadline_s, stage_deadline_s=stage_deadline_s, on_event=on_event,
                on_log=on_log,
            )  # fmt: skip
            return Finished(answer.result, folder, answer.peak_rss_bytes, answer.cpu_s)
        except BaseException:
            await asyncio.shield(_delete(folder))
            raise
        finally:
            self._users.append(user)

    async def describe_jail(self) -> JailReport:
        """Return the measures that isolate a child on this host, as a child reports them.

        Raises:
            JailIncomplete, NetworkNotRemoved: as `run`.
        """
        async with await self.run("etfarm.server.workers.child.task:describe_jail", None, deadline_s=_DESCRIBE_S) as finished:
            return JailReport.from_json(finished.result)

    def _jail(self, user: int | None) -> Jail:
        return Jail(
            daemon_network=self._network, point=str(self._folder / _POINT), user=user, place=find_cgroup_place(),
            cgroup=self._family, required=self._options.required,
        )  # fmt: skip

    async def _warm_up(self, light: bool) -> None:
        """Wait until a task's forkserver is warm, within the gate if it still has to warm up, which takes seconds of CPU time."""
        preload = self._choose_preload(light)
        if self._is_warm(preload):
            await self._ready(preload)
            return
        async with self._gate():
            await self._ready(preload)

    def _choose_preload(self, light: bool) -> tuple[str, ...]:
        return self._light_preload if light and not self._is_warm(self._preload) else self._preload

    def _is_warm(self, preload: tuple[str, ...]) -> bool:
        server = self._servers.get(preload)
        return server is not None and not server.has_ended and server.warm.done()

    def _current(self, preload: tuple[str, ...]) -> ForkserverProcess:
        if not self._is_started:
            raise WorkersDown("The compile workers are not running.", "Call start() first.")
        server = self._servers.get(preload)
        if server is not None and server.has_ended:
            server.close()
            server = None
        if server is None:
            server = self._servers[preload] = ForkserverProcess(self._folder, preload, self._options)
        return server


async def _delete(folder: Path) -> None:
    await asyncio.to_thread(output_files.delete, folder)


def _encode(request: object) -> bytes:
    return attendance.encode_request(request_files.files_of(request), request)
