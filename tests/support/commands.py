"""Commands of etfarm in forks of a process that has loaded torch, which a command that exports a model loads for seconds.

Run as `python -m tests.support.commands`, with a socket as its stdin. Each message is a command as JSON with three file
descriptors: its stdout, its stderr, and a socket that is sent its process id and then its exit code. Only third-party modules
are loaded before; a command loads etfarm itself, as in a process of its own. The process ends with its socket.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
_MAX_BYTES: Final = 1 << 16


class Commands:
    """The process that commands are forked from, started with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: dict[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as `subprocess.run` does.

        Raises:
            subprocess.TimeoutExpired: it does not end in time. It is killed.
        """
        message = json.dumps({"arguments": [*arguments], "cwd": str(cwd), "environment": environment}).encode()
        assert len(message) < _MAX_BYTES
        with contextlib.ExitStack() as stack:
            out, err = (os.fdopen(os.memfd_create(name), "rb") for name in ("stdout", "stderr"))
            stack.callback(out.close)
            stack.callback(err.close)
            status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(status)
            with theirs, self._lock:
                socket.send_fds(self._start(), [message], [out.fileno(), err.fileno(), theirs.fileno()])
            started = status.recv(32)
            assert started, "the process that commands are forked from has ended"
            pid = int(started)
            status.settimeout(timeout_s)
            try:
                code = int(status.recv(32) or -signal.SIGKILL)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([*arguments], timeout_s) from None
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(io.TextIOWrapper(file).read())
        return subprocess.CompletedProcess([*arguments], code, *texts)

    def _start(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                # One thread, also of numpy's library: a fork would lack the others.
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                process = subprocess.Popen([sys.executable, "-m", __name__], stdin=theirs, cwd=ROOT, env=environment)
            atexit.register(process.wait)
            atexit.register(self._socket.close)
        return self._socket


def main() -> int:
    """Serve until the socket is closed; in a fork, return the exit code of its command."""
    with socket.socket(fileno=os.dup(0)) as requests:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        load_torch()
        gc.freeze()
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _MAX_BYTES, 3)
            if not message:
                return 0
            if supervisor := os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                os.waitpid(supervisor, 0)
                continue
            requests.close()
            # A second fork, so that the next command need not wait for the end of this one.
            if os.fork():
                os._exit(0)
            out, err, status = descriptors
            reports = socket.socket(fileno=status)
            if (pid := os.fork()) == 0:
                reports.close()
                return execute(json.loads(message), out, err)
            reports.send(str(pid).encode())
            _, ended = os.waitpid(pid, 0)
            reports.send(str(os.waitstatus_to_exitcode(ended)).encode())
            os._exit(0)


def load_torch() -> None:
    """Load what a command that exports a model loads, without starting a thread."""
    import torch

    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # its monitor is a thread
    program = torch.export.export(torch.nn.Linear(1, 1).eval(), (torch.zeros(1, 1),))
    torch.export.save(program, io.BytesIO())
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"


def execute(command: dict[str, Any], out: int, err: int) -> int:
    """Run a command in this process, as `python -m etfarm.wire.command` does; return its exit code."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["cwd"])
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path.cwd()), *(folder for folder in path if folder and folder not in sys.path)]
    import torch

    from etfarm.wire import command as etfarm

    torch.set_num_threads(len(os.sched_getaffinity(0)))

    sys.argv = [etfarm.__file__, *command["arguments"]]
    return etfarm.main()


if __name__ == "__main__":
    sys.exit(main())
