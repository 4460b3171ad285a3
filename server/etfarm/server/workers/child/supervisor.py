"""The child that runs one task, and the supervisor beside it that leaves nothing of it behind.

forkserver -> supervisor -> child (jailed, leader of its own session) -> whatever the task starts.
The supervisor never touches a user's bytes. It is the first process of the child's process namespace, makes the child's control
group, and ends the whole tree when the child ends, and when the daemon closes its end of the status socket: by cancelling, or
by dying, however it died.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from etfarm.server.workers import errors
from etfarm.server.workers.channel import frames
from etfarm.server.workers.child.tree_memory import TreeMemory
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.file_view import Step
from etfarm.server.workers.jail.isolation import Jail
from etfarm.server.workers.jail.measures import JailReport
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError, FarmError
from etfarm.wire.sandbox import cgroups, syscalls

_POLL_MS: Final = 500
"""How often a supervisor looks at what the kernel does not limit: the disk, and in places the memory of its tree."""

_RESERVE_FILES: Final = 20_000
"""Files that the disk of a child's folder can still take; a twentieth of a small disk's."""


@dataclass(frozen=True)
class Order:
    """What the daemon asks the forkserver for; travels as JSON, the request itself follows on the channel."""

    task: str
    """`module:function`, called as function(request, folder, emit) -> bytes."""
    folder: str
    """The child's own, existing, empty folder."""
    limits: Limits
    jail: Jail


def supervise(order: Order, shared: Sequence[Step], channel: socket.socket, log: int, status: socket.socket) -> NoReturn:
    """Fork the child, wait for its end or for the daemon's hang-up, sweep, and report.

    Sends `{"exit": N, "peak_rss_bytes": N, "cpu_s": X, "out_of_memory": B, "too_many_processes": B, "disk_full": B}` on `status`;
    `exit` is the exit code, or -signal.

    Args:
        shared: what all children see of the host.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    syscalls.adopt_orphans()
    me = os.getpid()
    hang_up = select.poll()
    hang_up.register(status, select.POLLIN | select.POLLRDHUP)
    if hang_up.poll(0):
        os._exit(0)
    group = _group(order)
    watch = None if group is not None and group.limits_memory else TreeMemory(isolation.tree_bytes(order.limits))
    child = os.fork()
    if child == 0:
        status.close()
        run(order, shared, channel, log, me, group)
    channel.close()
    os.close(log)
    ended = os.pidfd_open(child)
    hang_up.register(ended, select.POLLIN)
    disk_full = _wait(hang_up, group, watch, order)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, waited, used = os.wait4(child, 0)
    _sweep(child)
    report = {
        "exit": os.waitstatus_to_exitcode(waited),
        "peak_rss_bytes": used.ru_maxrss * 1024,
        "cpu_s": used.ru_utime + used.ru_stime,
        "out_of_memory": bool((group is not None and group.oom_kills()) or (watch is not None and watch.is_exceeded)),
        "too_many_processes": bool(group is not None and group.refused_forks()),
        "disk_full": disk_full,
    }
    if group is not None:
        group.remove()
    with contextlib.suppress(OSError):
        status.sendall(json.dumps(report).encode())
    os._exit(0)


def _group(order: Order) -> cgroups.Group | None:
    place = order.jail.place
    if place is None:
        return None
    memory_bytes = isolation.tree_bytes(order.limits)
    name = Path(order.folder).name
    try:
        return cgroups.Group(place, order.jail.cgroup, name, memory_bytes=memory_bytes, processes=order.limits.processes)
    except OSError:
        traceback.print_exc()
        return None


def _wait(events: select.poll, group: cgroups.Group | None, watch: TreeMemory | None, order: Order) -> bool:
    """Wait until the child has ended, the daemon has hung up, or the tree has used up its memory or the disk.

    Return whether it was the disk.
    """
    while not events.poll(_POLL_MS):
        if watch is not None and watch.is_above():
            return False
        # Version 2 ends the whole group at once; version 1 ends one process, and the others would go on.
        if group is not None and group.version == 1 and group.oom_kills():
            # Time for the child to say itself what the death of its process means.
            events.poll(_POLL_MS)
            return False
        disk = os.statvfs(order.folder)
        # Empty files take no bytes, and the host is as full without inodes.
        few_files = disk.f_favail < min(_RESERVE_FILES, disk.f_files // 20)
        if few_files or disk.f_bavail * disk.f_frsize < order.limits.reserve_bytes:
            return True
    return False


def _sweep(child: int) -> None:
    """End everything that the child left: all processes of the namespace at once, or adopted orphans until there are none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # As process 1 of a namespace: all others in it.
        os.kill(-1, signal.SIGKILL) if os.getpid() == 1 else os.killpg(child, signal.SIGKILL)
    own = Path("/proc/thread-self/children")
    while True:
        for orphan in own.read_text().split() if os.getpid() != 1 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(orphan), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run(
    order: Order, shared: Sequence[Step], channel: socket.socket, log: int, supervisor: int, group: cgroups.Group | None
) -> NoReturn:
    """Live the child's whole life: the jail, the request, the task, the answer."""
    folder = Path(order.folder)
    answers = frames.FrameWriter(channel)
    code = 1
    try:
        kind, data = frames.receive(channel)
        if kind != frames.FILES:
            raise FarmError(f"The child was sent a frame of kind {kind!r} first.")
        report = isolation.enter(
            folder, order.limits, order.jail, log=log, channel=channel.fileno(), shared=shared,
            files=[Path(path) for path in json.loads(data)], group=group, is_first_process=supervisor == 1, watches_memory=True,
        )  # fmt: skip
        described.append(report)
        syscalls.die_with_parent(supervisor)
        os.close(log)
        _prepare(order.limits)
        kind, data = frames.receive(channel)
        if kind != frames.REQUEST:
            raise FarmError(f"The child was sent a frame of kind {kind!r} as its request.")
        task = _task(order.task)
        result = task(pickle.loads(data), folder, lambda event: answers.send(frames.EVENT, event))
        sys.stdout.flush()
        sys.stderr.flush()
        answers.send(frames.RESULT, result)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the child's last act: whatever it was becomes an answer
        code = _report(error, order, answers)
    finally:
        # No atexit, no destructors of native libraries: they crash after a good answer.
        os._exit(code)


described: Final[list[JailReport]] = []
"""In a child: its own jail."""


def describe_jail(request: object, folder: Path, emit: Callable[[bytes], None]) -> bytes:
    """Task: answer with this child's own `JailReport` as JSON."""
    return described[0].to_json()


def _prepare(limits: Limits) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
    for noisy in ("matplotlib", "urllib3", "torch.fx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if "torch" in sys.modules:
        # Only now, after the last fork: a forked torch that had threads before hangs.
        sys.modules["torch"].set_num_threads(limits.threads)


def _task(name: str) -> Callable[[object, Path, Callable[[bytes], None]], bytes]:
    module, _, function = name.partition(":")
    task: Callable[[object, Path, Callable[[bytes], None]], bytes] = getattr(importlib.import_module(module), function)
    return task


def _report(error: BaseException, order: Order, answers: frames.FrameWriter) -> int:
    told: EtfarmError
    # A traceback keeps the frames that hold the memory: free them before anything is formatted.
    if errors.is_out_of_memory(error):
        error.__traceback__ = None
        error.__context__ = None
        told = errors.ChildOutOfMemory(order.task, order.limits.memory_bytes, detail=str(error)[:500])
    elif errors.is_out_of_processes(error):
        told = errors.ChildTooManyProcesses(order.task, order.limits.processes)
    elif isinstance(error, OSError) and errors.is_disk_full(error):
        told = errors.ChildDiskFull(order.task, error.strerror or str(error))
    elif isinstance(error, EtfarmError):
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        told = error
    else:
        traceback.print_exception(error)
        last = "".join(traceback.format_exception(error)).splitlines()[-12:]
        told = FarmError(
            f"{order.task} failed inside of etfarm: {type(error).__name__}: {str(error).strip().splitlines()[:1]}",
            "This is a defect of etfarm: please report it with the job's log.",
            task=order.task, traceback="\n".join(last),
        )  # fmt: skip
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        answers.send(frames.ERROR, errors.to_json(told, hide={f"{order.folder}/": "", order.folder: "."}))
    except OSError:
        return 1
    return 0
