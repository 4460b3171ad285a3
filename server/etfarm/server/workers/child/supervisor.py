"""The supervisor of one child: it limits and watches the child, and leaves no process of it behind.

forkserver -> supervisor -> child (jailed, leader of its own session) -> whatever the task starts.
The supervisor never touches a user's bytes. It is the first process of the child's process namespace, makes the child's control
group, and ends the whole tree when the child ends, and when the daemon closes its end of the status socket: by cancelling, or
by dying, however it died.
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
from etfarm.server.workers.child.tree_memory import TreeMemory
from etfarm.server.workers.jail import isolation
from etfarm.server.workers.jail.file_view import Step
from etfarm.wire.sandbox import cgroups, syscalls

_POLL_MS: Final = 500
"""How often a supervisor looks at what the kernel does not limit: the disk, and in places the memory of its tree."""

_RESERVE_FILES: Final = 20_000
"""Files that the disk of a child's folder can still take; a twentieth of a small disk's."""


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
        task.run(order, shared, channel, log, me, group)
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
