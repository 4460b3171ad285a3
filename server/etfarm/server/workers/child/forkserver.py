"""The forkserver: imports and warms the toolchain once, then forks a supervisor for each order of the daemon.

Run as `python -m etfarm.server.workers.child.forkserver CONTROL ALIVE VISIBILITY PRELOAD...`. CONTROL and ALIVE are inherited
file descriptors, VISIBILITY is a JSON object of the paths that no child sees (`hidden`) and that all children see in addition
to the code (`readable`).
CONTROL is a SEQPACKET socket: the forkserver sends `{"failed": {entry: why}}` when it is warm; then each message from the daemon
is an Order as JSON with three file descriptors: channel, log, status. ALIVE is a pipe whose other end only the daemon holds, so
that its end means the daemon's death.

multiprocessing's forkserver is not used: it inherits the daemon's environment (tokens), imports the daemon's `__main__`
into each child, blocks in `Process.start()` while it warms up, and leaves grandchildren behind when it is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from etfarm.server.workers.child.supervisor import supervise
from etfarm.server.workers.child.task import Order
from etfarm.server.workers.jail import file_view
from etfarm.server.workers.jail.isolation import Jail
from etfarm.server.workers.limits import Limits
from etfarm.wire.sandbox import cgroups, namespaces, syscalls

MAX_ORDER_BYTES = 1 << 16


def main(arguments: Sequence[str]) -> None:
    """Serve until the daemon closes CONTROL or dies."""
    control = socket.socket(fileno=int(arguments[0]))
    alive = int(arguments[1])
    exit_with_daemon(alive)
    _acquire_rights()
    forks = namespaces.PidNamespaceForks()
    # Ended supervisors are reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()  # collections while modules are loaded take an eighth of the time, and free little
    failed = warm(arguments[3:])
    visibility = json.loads(arguments[2])
    shared = file_view.plan([*file_view.code_paths(), *map(Path, visibility["readable"])], map(Path, visibility["hidden"]))
    gc.collect()
    gc.freeze()  # a garbage collection in a child would otherwise write to, and thus copy, every page
    gc.enable()
    control.send(json.dumps({"failed": failed}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_ORDER_BYTES, 3)
        if not message:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if forks.fork() == 0:
            try:
                control.close()
                os.close(alive)
                channel, log, status = descriptors
                supervise(_parse_order(message), shared, socket.socket(fileno=channel), log, socket.socket(fileno=status))
            except BaseException:  # noqa: BLE001 - a supervisor must never return into the forkserver's loop
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def warm(entries: Sequence[str]) -> dict[str, str]:
    """Import each `module` and call the function of each `module:function`. Return the failed entries with their reasons."""
    failed = {}
    for entry in entries:
        module, _, function = entry.partition(":")
        try:
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
        except Exception as error:  # noqa: BLE001 - other providers must load even if one is missing
            traceback.print_exc()
            failed[entry] = f"{type(error).__name__}: {error}"
    return failed


def _parse_order(message: bytes) -> Order:
    order = json.loads(message)
    place = order["jail"].pop("place")
    jail = Jail(**order["jail"], place=None if place is None else cgroups.Place(**place))
    return Order(order["task"], order["folder"], Limits(**order["limits"]), jail)


def _acquire_rights() -> None:
    # Without the right to create namespaces, a user namespace is required; it is entered once, and supervisors inherit it.
    with contextlib.suppress(OSError):
        if not syscalls.has_capability(syscalls.CAP_SYS_ADMIN):
            namespaces.enter_user_namespace()


def exit_with_daemon(alive: int) -> None:
    """End this process when the daemon, which holds the other end of the pipe, ends."""
    # SIGIO's default action ends this process as soon as the pipe's last writer is gone, even during an import.
    # PR_SET_PDEATHSIG would already fire when the thread of the daemon that started this process ends.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    gone = select.poll()
    gone.register(alive, select.POLLIN)
    if gone.poll(0):
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
