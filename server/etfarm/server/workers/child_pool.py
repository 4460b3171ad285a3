"""The part that every pool of jailed children has: slots, tries, folders, and the attendance of each child.

Loads neither torch nor numpy. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import structlog

from etfarm.server.workers import output_files, request_files
from etfarm.server.workers.channel import attendance
from etfarm.server.workers.errors import ForkserverEnded, NodeLost, SupervisorKilled
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.limits import Limits
from etfarm.server.workers.ordered_process import Ends
from etfarm.wire.shielding import end_tasks

log = structlog.get_logger()

_DESCRIBE_S = 120.0
"""Deadline of a child that only describes its jail."""

_TRIES: Final = 3
"""Number of times that a task is started, which is not at fault if the kernel kills its forkserver, or if its node is lost."""

URGENT: Final = 1
"""Number of children beyond a pool's concurrency that only urgent tasks may start."""


OnTurn = Callable[[bool], None]
"""A callback for whether a task has its turn, or waits for it."""


@dataclass(frozen=True)
class PoolUse:
    """The use of a pool at one moment."""

    slots: int
    """Number of children that may run at a time, without urgent ones."""
    running: int
    waiting: int
    """Number of tasks that wait for their turn, or for the pool's warm-up."""
    nodes: Mapping[str, int]
    """Numbers of the cluster's nodes by state; empty for a pool of this host."""


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
        await delete(self.folder)


class ChildPool(ABC):
    """Jailed children, which run tasks; what compilations and reports need of them.

    Args:
        limits: limits of each child.
        folder: existing or new folder for the children's folders; `start` deletes its contents.
        slots: the children that may run at a time.
        gate: context manager that is entered for each child's lifetime, and while `run` waits for the pool's warm-up.
    """

    def __init__(
        self, *, limits: Limits, folder: Path, slots: FairSlots, gate: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._limits = limits
        self._folder = folder.resolve()
        self._slots = slots
        self._gate = gate
        self._is_started = False
        self._running: set[asyncio.Task[object]] = set()

    def measure(self) -> PoolUse:
        """Return the pool's use."""
        return PoolUse(self._slots.shared, self._slots.held, len(self._running) - self._slots.held, {})

    @abstractmethod
    def start(self) -> None:
        """Prepare the folder and start warming up; return within milliseconds. Call it in the event loop."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until children start without a delay.

        Raises:
            WorkersDown: they cannot be started; the message says why.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the children and what starts them, and delete the folder."""

    @abstractmethod
    async def _warm_up(self, light: bool) -> None:
        """Wait until a child can be ordered."""

    @abstractmethod
    def place(self, task: str, folder: Path, *, light: bool = False) -> AbstractContextManager[Ends]:
        """Order a child, which holds its place until the end of the block. `run` does this within a slot.

        Raises:
            ForkserverEnded: the process that starts children has ended; the next one takes orders.
        """

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
        on_turn: OnTurn = lambda has_turn: None,
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
                memory left, or because the child's node was lost; the new child repeats the events.
            on_turn: called with False when the task begins to wait for warm-up, a slot or the gate, and with True when its child
                starts.

        Raises:
            EtfarmError: the task raised it; its fault, reason, message, stage and metadata are kept.
            ChildDied: the child was killed by a signal or ended without an answer.
            ChildOutOfMemory: the child and its processes needed more memory than the limits allow.
            DISK_FULL: the disk of the child's folder is full, whatever filled it.
            CHILD_TOO_MANY_PROCESSES: the child started more processes and threads than the limits allow.
            TOO_MANY_FILES: `request` names more files than can be mounted for a child.
            JAIL_INCOMPLETE: the host does not allow a measure, and the options require all.
            ChildTimedOut: the child or one of its stages exceeded its deadline.
            WorkersDown: the forkserver is not running, and cannot be started.
            NodeLost: the child's node was lost, and so were the nodes of further tries.

        When the caller is cancelled, the child and all of its descendants are killed before CancelledError propagates.
        """
        current = asyncio.current_task()
        assert current is not None
        self._running.add(current)
        try:
            tries = 1
            while True:
                on_turn(False)
                try:
                    await self._warm_up(light)
                    async with self._slots.take(whose, urgent=urgent), self._gate():
                        on_turn(True)
                        return await self._run(
                            task, request, light, deadline_s=deadline_s, stage_deadline_s=stage_deadline_s, on_event=on_event,
                            on_log=on_log,
                        )  # fmt: skip
                except (ForkserverEnded, NodeLost, SupervisorKilled) as error:
                    if not self._is_started or tries == _TRIES:
                        raise
                    tries += 1
                    log.warning("what starts children was lost, starting its task again", task=task, why=error.message)
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
        try:
            data = await asyncio.to_thread(_encode, request)
            with self.place(task, folder, light=light) as ends:
                answer = await attendance.attend(
                    task, data, ends, self._limits, deadline_s=deadline_s, stage_deadline_s=stage_deadline_s, on_event=on_event,
                    on_log=on_log,
                )  # fmt: skip
            return Finished(answer.result, folder, answer.peak_rss_bytes, answer.cpu_s)
        except BaseException:
            await asyncio.shield(delete(folder))
            raise

    async def describe_jail(self) -> JailReport:
        """Return the measures that isolate a child on this host, as a child reports them.

        Raises:
            JAIL_INCOMPLETE, NETWORK_NOT_REMOVED: as `run`.
        """
        async with await self.run("etfarm.server.workers.child.task:describe_jail", None, deadline_s=_DESCRIBE_S) as finished:
            return JailReport.from_json(finished.result)

    async def _stop_running(self) -> None:
        """End all children, and start none."""
        await end_tasks(*self._running)
        self._is_started = False


async def delete(folder: Path) -> None:
    """Delete a child's folder."""
    await asyncio.to_thread(output_files.delete, folder)


def _encode(request: object) -> bytes:
    files = request_files.files_of(request)
    return attendance.encode_request(files, request_files.encode(request, files))
