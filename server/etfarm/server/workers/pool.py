"""The daemon's side of its children: starts the forkserver, runs tasks in children, ends them.

Loads neither torch nor numpy. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

from etfarm.server.workers import errors, output_files, request_files
from etfarm.server.workers.channel import frames
from etfarm.server.workers.channel.child_output import Heard, follow, listen
from etfarm.server.workers.fair_slots import Turns
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.isolation import Jail, JailOptions
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import FarmError
from etfarm.wire.sandbox import cgroups, namespaces

_POINT = "view"
"""Folder in the children's that each child's root is mounted on, in a mount namespace of its own."""

_KILL_S = 5.0
"""How long the end of a killed tree may take before the daemon goes on without having seen it."""


_DESCRIBE_S = 120.0
"""How long a child may take that only describes its jail."""


class WorkersDown(FarmError):
    """The forkserver ended or could not be warmed."""

    reason = "WORKERS_DOWN"


@dataclass(frozen=True)
class Finished:
    """A task's result. Use it as an async context manager: leaving it deletes `folder`."""

    result: bytes
    """What the task returned."""
    folder: Path
    """The child's folder with the files that it wrote; move what is to stay out of it before leaving."""
    peak_rss_bytes: int
    """Largest resident set of the child, the forkserver's shared pages included."""
    cpu_s: float
    """CPU time of the child and of the processes that it waited for."""

    async def __aenter__(self) -> Finished:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await _delete(self.folder)


@dataclass
class _Forkserver:
    """One incarnation of the forkserver process."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    alive: int
    warm: asyncio.Future[dict[str, str]]


class Workers:
    """A forkserver and its children, at most `concurrency` at a time.

    Args:
        preload: `module` to import or `module:function` to call in the forkserver before it serves.
        limits: of each child.
        folder: existing or new folder for the children's folders; its old content is deleted at the start.
        concurrency: children at a time; more callers of `run` wait their turn, see there.
        gate: entered around each child's life.
        options: of the children's jail. The children's folders are hidden from each other in any case.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str],
        limits: Limits,
        folder: Path,
        concurrency: int,
        gate: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
        options: JailOptions = JailOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._preload = tuple(preload)
        self._limits = limits
        self._folder = folder.resolve()
        self._slots = Turns(concurrency)
        self._gate = gate
        self._server: _Forkserver | None = None
        self._network = namespaces.network_inode()
        self._options = options
        first = options.first_user
        if first is None or os.geteuid() != 0:
            first = isolation.choose_users(self._folder, concurrency)
        self._users = [None if first is None else first + number for number in range(concurrency)]
        self._family = f"etfarm-{hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:12]}"
        self._running: set[asyncio.Task[object]] = set()

    def start(self) -> None:
        """Starts the forkserver and returns within milliseconds; it warms up by itself. Call it in the event loop."""
        if (place := _place()) is not None:
            cgroups.remove_family(place, self._family)  # of a server that was killed
        output_files.delete(self._folder)
        self._folder.mkdir(parents=True, mode=0o700)
        (self._folder / _POINT).mkdir(mode=0o700)
        self._server = self._launch()

    @property
    def forkserver_pid(self) -> int | None:
        """The forkserver's process id; None before `start` and after `stop`."""
        return None if self._server is None else self._server.process.pid

    async def ready(self) -> None:
        """Waits until the forkserver is warm.

        Raises:
            WorkersDown: it ended instead, or an entry of `preload` failed; the sentence says which and why.
        """
        server = self._current()
        failed = await asyncio.shield(server.warm)
        if failed:
            entry, why = next(iter(failed.items()))
            raise WorkersDown(
                f"The compile workers could not load {entry}: {why}.",
                "Install etfarm[server] completely.",
                entry=entry,
                why=why,
            )

    async def stop(self) -> None:
        """Ends the children, then the forkserver, and deletes the folder."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._server is not None:
            server, self._server = self._server, None
            self._close(server)
            await asyncio.to_thread(server.process.wait)
        await _delete(self._folder)

    async def run(
        self,
        task: str,
        request: object,
        *,
        deadline_s: float,
        stage_deadline_s: float | None = None,
        whose: str = "",
        on_event: Callable[[bytes], None] = lambda _: None,
        on_log: Callable[[str], None] = lambda _: None,
    ) -> Finished:
        """Runs `task` in a fresh jailed child and gives its result and folder.

        Of the host's files, the child may read the system's, the installed code, and every Path that is in `request`.

        Args:
            task: `module:function`; called in the child as function(request, folder, emit) -> bytes.
            request: pickled to the child; of a type that the child can import.
            deadline_s: wall-clock seconds from the child's start; waiting for a slot or for warm-up does not count.
            stage_deadline_s: wall-clock seconds of each stage, and of what comes before the first and after each; None
                for no more than `deadline_s`.
            whose: the project that asks: those that wait for a slot take turns.
            on_event: gets what the task emits, in order, on the event loop. JSON objects with `stage` and a `phase` of
                START or END name the stage in which a death happened, and set the stage's clock anew.
            on_log: gets each line that the child, its native code and its subprocesses write to stdout or stderr.

        Raises:
            EtfarmError: the task raised it; its fault, reason, sentence, stage and metadata are kept.
            ChildDied: the child died of a signal or ended without an answer.
            ChildOutOfMemory: it, with all that it started, needed more memory than the limits give.
            ChildDiskFull: the disk of its folder is full, by itself or not.
            ChildTooManyProcesses: it started more processes and threads than the limits give.
            TooManyFiles: `request` names more files than a child can be shown.
            JailIncomplete: the host does not allow a measure, and the options require all.
            ChildTimedOut: it, or one of its stages, was not done by the deadline.
            WorkersDown: there is no forkserver.
        A cancelled caller's child and all of its descendants are killed before CancelledError goes on.
        """
        me = asyncio.current_task()
        assert me is not None
        self._running.add(me)
        try:
            await self.ready()
            async with self._slots.take(whose), self._gate():
                folder = Path(tempfile.mkdtemp(prefix="job-", dir=self._folder))
                user = self._users.pop()
                try:
                    return await self._attend(task, request, folder, user, deadline_s, stage_deadline_s, on_event, on_log)
                except BaseException:
                    await asyncio.shield(_delete(folder))
                    raise
                finally:
                    self._users.append(user)
        finally:
            self._running.discard(me)

    async def _attend(
        self,
        task: str,
        request: object,
        folder: Path,
        user: int | None,
        deadline_s: float,
        stage_deadline_s: float | None,
        on_event: Callable[[bytes], None],
        on_log: Callable[[str], None],
    ) -> Finished:
        heard = Heard()
        stage_clock = asyncio.timeout(stage_deadline_s)

        def on_stage() -> None:
            if stage_deadline_s is not None and not stage_clock.expired():
                stage_clock.reschedule(asyncio.get_running_loop().time() + stage_deadline_s)

        data = await asyncio.to_thread(_encode, request)
        channel, log, status = self._order(task, folder, user)
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        ended, hang_up = await asyncio.open_unix_connection(sock=status)
        lines = await _reader(log)
        try:
            async with asyncio.timeout(deadline_s), stage_clock, asyncio.TaskGroup() as group:
                group.create_task(_send(writer, data), name=f"request of {task}")
                group.create_task(listen(reader, heard, on_event, on_stage), name=f"channel of {task}")
                group.create_task(follow(lines, heard, on_log), name=f"log of {task}")
                final = group.create_task(ended.read(), name=f"status of {task}")
        except TimeoutError:
            if stage_deadline_s is not None and stage_clock.expired():
                raise errors.ChildTimedOut(task, stage_deadline_s, heard.stage, clock="stage") from None
            raise errors.ChildTimedOut(task, deadline_s, heard.stage) from None
        except ExceptionGroup as failed:
            raise _first(failed) from None
        finally:
            # The supervisor takes this as the order to kill; when it has ended already, nothing happens.
            await asyncio.shield(_hang_up(hang_up, ended))
            writer.close()
        return self._conclude(task, folder, heard, final.result())

    async def describe_jail(self) -> JailReport:
        """Return the measures that a child of this host is kept apart with, as a child finds them.

        Raises:
            JailIncomplete, NetworkNotRemoved: as of `run`.
        """
        async with await self.run(
            "etfarm.server.workers.child.supervisor:describe_jail", None, deadline_s=_DESCRIBE_S
        ) as finished:
            return JailReport.from_json(finished.result)

    def _order(self, task: str, folder: Path, user: int | None) -> tuple[socket.socket, int, socket.socket]:
        """Sends the forkserver an order. Gives this side's ends of the channel, the log and the status."""
        server = self._current()
        channel, channel_child = socket.socketpair()
        status, status_child = socket.socketpair()
        log, log_child = os.pipe()
        asked = Jail(
            daemon_network=self._network, point=str(self._folder / _POINT), user=user, place=_place(), cgroup=self._family,
            required=self._options.required,
        )  # fmt: skip
        order = {"task": task, "folder": str(folder), "limits": asdict(self._limits), "jail": asdict(asked)}
        try:
            # Orders are small and at most `concurrency` are on their way: this never blocks.
            children = [channel_child.fileno(), log_child, status_child.fileno()]
            socket.send_fds(server.control, [json.dumps(order).encode()], children)
        except OSError as error:
            channel.close()
            status.close()
            os.close(log)
            raise WorkersDown(f"The forkserver takes no orders: {error.strerror}.") from error
        finally:
            channel_child.close()
            status_child.close()
            os.close(log_child)
        return channel, log, status

    def _conclude(self, task: str, folder: Path, heard: Heard, report: bytes) -> Finished:
        try:
            said = json.loads(report)
            status = int(said["exit"])
        except (ValueError, KeyError, TypeError):
            raise errors.ChildDied(task, -signal.SIGKILL, heard.stage, "\n".join(heard.tail)) from None
        if heard.result is None or status != 0:
            # A process of the tree was refused or ended for it, whatever the child made of that.
            if said["out_of_memory"]:
                raise errors.ChildOutOfMemory(task, self._limits.memory_bytes, heard.stage, "\n".join(heard.tail)[-2000:])
            if said["disk_full"]:
                raise errors.ChildDiskFull(task, f"the disk has less than {self._limits.reserve_bytes >> 20} MiB or files left")
            if said["too_many_processes"]:
                raise errors.ChildTooManyProcesses(task, self._limits.processes, heard.stage)
        if heard.error is not None:
            stage = heard.error.stage = heard.error.stage or heard.stage
            if heard.error.reason == errors.ChildOutOfMemory.reason:
                detail = heard.error.metadata.get("detail", "")
                raise errors.ChildOutOfMemory(task, self._limits.memory_bytes, stage, detail)
            if heard.error.reason == errors.ChildTooManyProcesses.reason:
                raise errors.ChildTooManyProcesses(task, self._limits.processes, stage)
            raise heard.error
        if heard.result is not None and status == 0:
            return Finished(heard.result, folder, int(said["peak_rss_bytes"]), float(said["cpu_s"]))
        log = "\n".join(heard.tail)
        if status == -signal.SIGXCPU:
            raise errors.ChildTimedOut(task, self._limits.cpu_s, heard.stage, clock="CPU")
        if errors.is_out_of_memory(RuntimeError(log)):
            raise errors.ChildOutOfMemory(task, self._limits.memory_bytes, heard.stage, log[-2000:])
        raise errors.ChildDied(task, status, heard.stage, log)

    def _current(self) -> _Forkserver:
        if self._server is None:
            raise WorkersDown("The compile workers are not running.", "Call start() first.")
        if self._server.process.poll() is not None:
            self._close(self._server)
            self._server = self._launch()
        return self._server

    def _launch(self) -> _Forkserver:
        control, control_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        alive_child, alive = os.pipe()
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        hidden = [str(path) for path in (self._folder, *self._options.hidden)]
        sight = json.dumps({"hidden": hidden, "readable": [str(path) for path in self._options.readable]})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "etfarm.server.workers.child.forkserver", str(control_child.fileno()),
                 str(alive_child), sight, *self._preload],
                stdin=subprocess.DEVNULL, pass_fds=(control_child.fileno(), alive_child), cwd=home,
                env=isolation.clean_environment(home), start_new_session=True,
            )  # fmt: skip
        finally:
            control_child.close()
            os.close(alive_child)
        loop = asyncio.get_running_loop()
        server = _Forkserver(process, control, alive, loop.create_future())
        # Its exception is told to whoever waits in ready(); nobody has to.
        server.warm.add_done_callback(lambda warm: warm.cancelled() or warm.exception())
        loop.add_reader(control, self._on_control, server)
        return server

    @staticmethod
    def _on_control(server: _Forkserver) -> None:
        try:
            message = server.control.recv(1 << 16)
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(server.control)
        if server.warm.done():
            return
        if message:
            server.warm.set_result(json.loads(message)["failed"])
        else:
            server.warm.set_exception(WorkersDown("The forkserver ended while it was warming up."))

    @staticmethod
    def _close(server: _Forkserver) -> None:
        asyncio.get_running_loop().remove_reader(server.control)
        server.control.close()
        os.close(server.alive)  # its end ends the forkserver
        if not server.warm.done():
            server.warm.set_exception(WorkersDown("The compile workers were stopped."))


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    # A child that is refused by its jail answers before it has read its request.
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader),
        os.fdopen(descriptor, "rb", buffering=0),
    )
    return reader


async def _hang_up(writer: asyncio.StreamWriter, ended: asyncio.StreamReader) -> None:
    try:
        writer.write_eof()
        async with asyncio.timeout(_KILL_S):
            await ended.read()
    except OSError:
        return  # ended before; asyncio's timeout is an OSError too: then the supervisor is left to itself
    finally:
        writer.close()


async def _delete(folder: Path) -> None:
    await asyncio.to_thread(output_files.delete, folder)


def _encode(request: object) -> bytes:
    """Return the frames that a child is sent: the files that it may read, then the request."""
    files = json.dumps([str(path) for path in request_files.files_of(request)]).encode()
    return frames.encode(frames.FILES, files) + frames.encode(frames.REQUEST, pickle.dumps(request))


@cache
def _place() -> cgroups.Place | None:
    """Return where this process can limit its children's trees; it stays so for the process's life."""
    place = cgroups.find_place()
    if place is not None:
        atexit.register(cgroups.leave, place)
    return place


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
