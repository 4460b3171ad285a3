"""The supervisor of one child, which limits and watches the child, and ends all of its processes.

forkserver -> supervisor -> child (jailed, leader of a new session) -> processes that the task starts.
The supervisor never reads a user's bytes. It is the first process of the child's process namespace and creates the child's
control group. It kills the whole tree when the child ends, or when the daemon's end of the status socket closes because the
daemon cancels the task or dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from etfarm.server.workers.child import task
from etfarm.server.workers.child.task import Order
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.file_view import Step
from etfarm.wire.sandbox import cgroups, syscalls

_POLL_MS: Final = 500
"""Interval of the checks of what the kernel does not limit: the disk, and on some hosts the tree's memory."""

_RESERVE_FILES: Final = 20_000
"""Number of files to keep free on the disk of a child's folder; a twentieth of all files on a small disk."""


def supervise(order: Order, shared: Sequence[Step], channel: socket.socket, log: int, status: socket.socket) -> NoReturn:
    """Fork the child, wait until it ends or the daemon hangs up, end its remaining processes, and report.

    Sends `{"exit": N, "peak_rss_bytes": N, "cpu_s": X, "out_of_memory": B, "too_many_processes": B, "disk_full": B}` on `status`;
    `exit` is the exit code, or -signal.

    Args:
        shared: paths of the host that all children see.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    syscalls.adopt_orphans()
    own_pid = os.getpid()
    hang_up = select.poll()
    hang_up.register(status, select.POLLIN | select.POLLRDHUP)
    if hang_up.poll(0):
        os._exit(0)
    group = _create_group(order)
    watch = None if group is not None and group.limits_memory else TreeMemory(isolation.tree_bytes(order.limits))
    child = os.fork()
    if child == 0:
        status.close()
        task.run(order, shared, channel, log, own_pid, group)
    channel.close()
    os.close(log)
    ended = os.pidfd_open(child)
    hang_up.register(ended, select.POLLIN)
    disk_full = _wait(hang_up, group, watch, order)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, waited, used = os.wait4(child, 0)
    _kill_remaining(child)
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


def _create_group(order: Order) -> cgroups.Group | None:
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
    """Wait until the child ends, the daemon hangs up, or the tree exhausts its memory or the disk.

    Return True for the disk.
    """
    while not events.poll(_POLL_MS):
        if watch is not None and watch.is_above():
            return False
        # Version 2 kills the whole group at once; version 1 kills one process, and the others continue.
        if group is not None and group.version == 1 and group.oom_kills():
            # Gives the child time to report the error itself.
            events.poll(_POLL_MS)
            return False
        try:
            disk = os.statvfs(order.folder)
        except FileNotFoundError:  # the server has ended, and the next one has deleted what was left
            return False
        # Empty files take no bytes, but the host cannot create files without inodes.
        few_files = disk.f_favail < min(_RESERVE_FILES, disk.f_files // 20)
        if few_files or disk.f_bavail * disk.f_frsize < order.limits.reserve_bytes:
            return True
    return False


def _kill_remaining(child: int) -> None:
    """Kill all remaining processes: those of the namespace at once, or adopted orphans until there are none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # As process 1 of a namespace, kill(-1) reaches all other processes in it.
        os.kill(-1, signal.SIGKILL) if os.getpid() == 1 else os.killpg(child, signal.SIGKILL)
    children = Path("/proc/thread-self/children")
    while True:
        for orphan in children.read_text().split() if os.getpid() != 1 else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(orphan), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


class TreeMemory:
    """The total memory of this process's descendants.

    Args:
        limit_bytes: limit above which `is_above` returns True.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.is_exceeded = False
        """Whether `is_above` has ever returned True."""

    def is_above(self) -> bool:
        """Measure the tree; return whether it uses more than its limit."""
        self.is_exceeded = self.is_exceeded or sum(map(_own_bytes, _descendants())) > self._limit_bytes
        return self.is_exceeded


def _descendants() -> list[str]:
    """Return the ids of this process's descendants, in the process namespace that /proc belongs to."""
    pids = Path("/proc/thread-self/children").read_text().split()
    for pid in pids:  # grows during the loop
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += (task / "children").read_text().split()
    return pids


def _own_bytes(pid: str) -> int:
    """Return a process's proportional share of memory in bytes, in which shared pages count once; 0 if it has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith(("Pss_Anon:", "Pss_Shmem:")))
