"""Commands of etfarm in forks of a process that has loaded third-party modules, which take most of the time of a start.

Run as `python -m tests.support.forks MODULE ...`, with a socket as its stdin. Each message is a command as JSON with four file
descriptors: its stdin, stdout and stderr, and a socket that is sent its process id with a pidfd, and then its exit code. A
command loads etfarm itself, as in a process of its own. The process ends with its socket, and with it what still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

COMMAND: Final = "etfarm.wire.command"
ROOT: Final = Path(__file__).parents[2]
_MAX_BYTES: Final = 1 << 16
_READ_AT_START: Final = ("GRPC_", "LANG", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON", "TZ")
"""How the names of variables begin that the interpreter and its libraries have read before a fork."""


class Fork:
    """A forked command, with what tests use of `subprocess.Popen`. The process that it is forked from reaps it at once."""

    def __init__(self, arguments: Sequence[str], status: socket.socket) -> None:
        self.args = [*arguments]
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status = status
        weakref.finalize(self, status.close)
        message, descriptors, _, _ = socket.recv_fds(status, 32, 1)
        assert message, "the process that commands are forked from has ended"
        self.pid = int(message)
        (self._pidfd,) = descriptors
        weakref.finalize(self, os.close, self._pidfd)

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: it does not end in time.
        """
        ended = select.poll()
        ended.register(self._status, select.POLLIN)
        if self.returncode is None and not ended.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        with self._lock:
            if self.returncode is None:
                code = self._status.recv(32)
                assert code, "the process that commands are forked from has ended"
                self.returncode = int(code)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that commands are forked from, started with the first one.

    Args:
        modules: names of the modules that it loads.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    @cached_property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1"}  # one thread, also of numpy's library

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether nothing that is read before a fork is another in this environment."""
        return _read_at_start(environment) == _read_at_start(self._environment)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[Any]) -> Fork:
        """Start a command with pipes, as `subprocess.Popen` does, in the current folder."""
        stdin, writing = os.pipe()
        reading, stdout = os.pipe()
        try:
            fork = self._fork(arguments, Path.cwd(), environment, stdin, stdout, stderr.fileno())
        finally:
            os.close(stdin)
            os.close(stdout)
        fork.stdin, fork.stdout = os.fdopen(writing, "w"), os.fdopen(reading)
        return fork

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as `subprocess.run` does, with an empty stdin.

        Raises:
            subprocess.TimeoutExpired: it does not end in time. It is killed.
        """
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(os.fdopen(os.memfd_create(name), "rb")) for name in ("stdout", "stderr"))
            null = stack.enter_context(Path(os.devnull).open())
            fork = self._fork(arguments, cwd, environment, null.fileno(), out.fileno(), err.fileno())
            try:
                code = fork.wait(timeout_s)
            except subprocess.TimeoutExpired:
                fork.kill()
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(io.TextIOWrapper(file).read())
        return subprocess.CompletedProcess([*arguments], code, *texts)

    def _fork(self, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], *files: int) -> Fork:
        message = json.dumps({"arguments": [*map(str, arguments)], "cwd": str(cwd), "environment": {**environment}}).encode()
        assert len(message) < _MAX_BYTES
        status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            socket.send_fds(self._connect(), [message], [*files, theirs.fileno()])
        return Fork(arguments, status)

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, *self._modules],
                    # Also its stdout, so that the object in front of it, which forks keep, takes it for no file and no terminal.
                    stdin=theirs.fileno(), stdout=theirs.fileno(),
                    cwd=ROOT, env=self._environment,
                )  # fmt: skip
            atexit.register(process.wait)
            atexit.register(self._socket.close)
        return self._socket


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def main(modules: Sequence[str]) -> int:
    """Serve until the socket is closed; in a fork, run its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to pytest, which ends this process
    with socket.socket(fileno=os.dup(0)) as requests:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.close(null)
        load(modules)
        gc.freeze()
        request = serve(requests)
    return execute(*request) if request else 0


def load(modules: Sequence[str]) -> None:
    """Load modules without starting a thread; of torch also what a command that exports a model loads."""
    for name in modules:
        importlib.import_module(name)
    if "torch" in modules:
        torch = importlib.import_module("torch")
        importlib.import_module("tqdm").tqdm.monitor_interval = 0  # its monitor is a thread
        program = torch.export.export(torch.nn.Linear(1, 1).eval(), (torch.zeros(1, 1),))
        torch.export.save(program, io.BytesIO())
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    assert "etfarm" not in sys.modules, "a command loads its own"


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request, and report the ends of forks; return the request in its fork, and None when the socket is closed.

    A caller that no longer listens for a fork is no error.
    """
    forks: dict[int, tuple[int, socket.socket]] = {}
    events = select.poll()
    events.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in events.poll():
            if descriptor in forks:
                pid, reports = forks.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                with reports, contextlib.suppress(BrokenPipeError):
                    reports.send(str(os.waitstatus_to_exitcode(status)).encode())
                events.unregister(descriptor)
                os.close(descriptor)
                continue
            message, received, _, _ = socket.recv_fds(requests, _MAX_BYTES, 4)
            if not message:
                for pidfd in forks:
                    for number in (signal.SIGTERM, signal.SIGCONT):
                        signal.pidfd_send_signal(pidfd, number)
                return None
            if (pid := os.fork()) == 0:
                return json.loads(message), received[:3]
            pidfd, reports = os.pidfd_open(pid), socket.socket(fileno=received.pop())
            for file in received:
                os.close(file)
            with contextlib.suppress(BrokenPipeError):
                socket.send_fds(reports, [str(pid).encode()], [pidfd])
            forks[pidfd] = pid, reports
            events.register(pidfd, select.POLLIN)


def execute(command: dict[str, Any], files: Sequence[int]) -> int:
    """Run a command in this process, as `python -m` does; return its exit code."""
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
    os.closerange(len(files), os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["cwd"])
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(Path.cwd()), *(folder for folder in path if folder and folder not in sys.path)]
    sys.argv[1:] = command["arguments"]
    sys.orig_argv[1:] = ["-m", COMMAND, *command["arguments"]]
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
