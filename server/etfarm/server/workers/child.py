"""The child that runs one task, and the supervisor beside it that leaves nothing of it behind.

forkserver -> supervisor -> child (jailed, leader of its own session) -> whatever the task starts.
The supervisor never touches a user's bytes. It ends the whole tree when the child ends, and when the daemon closes its
end of the status socket: by cancelling, or by dying, however it died.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from etfarm.server.workers import faults, frames, jail
from etfarm.server.workers.limits import Limits
from etfarm.wire.errors import EtfarmError, FarmError


@dataclass(frozen=True)
class Order:
    """What the daemon asks the forkserver for; travels as JSON, the request itself follows on the channel."""

    task: str
    """`module:function`, called as function(request, folder, emit) -> bytes."""
    folder: str
    """The child's own, existing, empty folder."""
    daemon_network: int
    """Inode of the daemon's network namespace."""
    limits: Limits


def supervise(order: Order, channel: socket.socket, log: int, status: socket.socket) -> NoReturn:
    """Forks the child, waits for its end or for the daemon's hang-up, sweeps, and reports.

    Sends `{"exit": N, "peak_rss_bytes": N, "cpu_s": X}` on `status`; N is the exit code, or -signal.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    jail.adopt_orphans()
    me = os.getpid()
    hang_up = select.poll()
    hang_up.register(status, select.POLLIN | select.POLLRDHUP)
    if hang_up.poll(0):
        os._exit(0)
    child = os.fork()
    if child == 0:
        status.close()
        run(order, channel, log, me)
    channel.close()
    os.close(log)
    ended = os.pidfd_open(child)
    hang_up.register(ended, select.POLLIN)
    hang_up.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, waited, used = os.wait4(child, 0)
    _sweep(child)
    report = {
        "exit": os.waitstatus_to_exitcode(waited),
        "peak_rss_bytes": used.ru_maxrss * 1024,
        "cpu_s": used.ru_utime + used.ru_stime,
    }
    with contextlib.suppress(OSError):
        status.sendall(json.dumps(report).encode())
    os._exit(0)


def _sweep(child: int) -> None:
    """Ends everything that the child left: its process group at once, then adopted orphans until there are none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for orphan in own.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(orphan), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def run(order: Order, channel: socket.socket, log: int, supervisor: int) -> NoReturn:
    """The child's whole life: the jail, the request, the task, the answer."""
    folder = Path(order.folder)
    answers = frames.FrameWriter(channel)
    code = 1
    try:
        jail.enter(folder, order.limits, order.daemon_network, log)
        jail.die_with_parent(supervisor)
        os.close(log)
        _prepare(order.limits)
        kind, data = frames.receive(channel)
        if kind != frames.REQUEST:
            raise FarmError(f"The child was sent a frame of kind {kind!r} first.")
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
    if faults.is_out_of_memory(error):
        error.__traceback__ = None
        error.__context__ = None
        told = faults.ChildOutOfMemory(order.task, order.limits.memory_bytes, detail=str(error)[:500])
    elif isinstance(error, OSError) and faults.is_disk_full(error):
        told = faults.ChildDiskFull(order.task, error.strerror or str(error))
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
        answers.send(frames.ERROR, faults.to_json(told, hide={f"{order.folder}/": "", order.folder: "."}))
    except OSError:
        return 1
    return 0
