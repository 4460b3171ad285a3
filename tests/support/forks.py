"""Commands of etfarm in forks of a process that has loaded third-party modules, which take most of the time of a start.

Run as `python -m tests.support.forks MODULE ... --door MODULE ...`, with a socket as its stdin. Each message is a command as JSON
with file descriptors: those of the command, and a socket that is sent its process id with a pidfd, and then its exit code. A
command loads etfarm itself, as in a process of its own. The process ends with its socket, and with it what still runs.

The forkservers of forked servers are forked as well, from a process that has loaded torch and ExecuTorch, the modules behind the
door, and that begins when a server first asks for one. They are no children of the servers.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import itertools
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final, cast

COMMAND: Final = "etfarm.wire.command"
FORKSERVER: Final = "etfarm.server.workers.child.forkserver"
DOOR: Final = "--door"
"""Before the modules of the process that forkservers are forked from."""
ROOT: Final = Path(__file__).parents[2]
_SOCKETS: Final = "--sockets"
_MAX_BYTES: Final = 1 << 16
_MAX_FILES: Final = 8
_FIRST_FREE: Final = 1 << 9
"""Above the file descriptors that a command may ask for."""
OF_FORKSERVERS: Final = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
"""What servers set in the environment of a forkserver, as far as it is read at its start."""
KEPT: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "ATEN_CPU_CAPABILITY")
"""Variables of servers that forkservers keep."""
_LIMITS: Final = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
WARM: Final = "etfarm.server.compile.prewarm:warm"
"""Among the arguments of a forkserver that loads torch and ExecuTorch."""
TOOLCHAIN: Final = (
    "torch", "executorch.kernels.quantized", "executorch.runtime", "torchao.quantization.pt2e.quantize_pt2e",
    "executorch.backends.xnnpack.recipes", "executorch.devtools", "executorch.export",
)  # fmt: skip
"""What a forkserver loads that is not etfarm's."""
_READ_AT_START: Final = ("ATEN_", "GRPC_", "LANG", "LC_", "LD_", "MALLOC_", "OPENSSL_", "PYTHON", "TZ")
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
        self._start: tuple[int, int] | None = None
        weakref.finalize(self, status.close)

    @property
    def pid(self) -> int:
        """The process id, once the command has been forked."""
        return self._started()[0]

    def _started(self) -> tuple[int, int]:
        with self._lock:
            if self._start is None:
                message, descriptors, _, _ = socket.recv_fds(self._status, 32, 1)
                assert message, "the process that commands are forked from has ended"
                self._start = int(message), descriptors[0]
                weakref.finalize(self, os.close, descriptors[0])
            return self._start

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
        for is_end in (False, True):
            if not is_end and self._start is not None:
                continue
            if self.returncode is None and not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._started()
        with self._lock:
            if self.returncode is None:
                code = self._status.recv(32)
                assert code, "the process that commands are forked from has ended"
                self.returncode = int(code)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._started()[1], number)

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
        toolchain: those of the process that forkservers are forked from.
    """

    def __init__(self, *modules: str, toolchain: Sequence[str] = TOOLCHAIN) -> None:
        self._arguments = [*modules, DOOR, *toolchain]
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
            fork = self._fork(_of_command(arguments, Path.cwd(), environment), stdin, stdout, stderr.fileno())
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
            fork = self._fork(_of_command(arguments, cwd, environment), null.fileno(), out.fileno(), err.fileno())
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

    def run_module(
        self, name: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
    ) -> tuple[Fork, IO[bytes], IO[bytes], IO[bytes]]:
        """Run a module, as `python -P -m` does, in a session of its own; return it with its stdin, stdout and stderr."""
        ends = [os.pipe() for _ in range(3)]
        (stdin, writing), *readings = ends
        try:
            command = Command(["-P", "-m", name], [*arguments], str(cwd), {**environment}, [0, 1, 2], has_session=True)
            fork = self._fork(command, stdin, *(written for _, written in readings))
        finally:
            for file in (stdin, *(written for _, written in readings)):
                os.close(file)
        out, err = (os.fdopen(read, "rb", 0) for read, _ in readings)
        return fork, os.fdopen(writing, "wb", 0), out, err

    def _fork(self, command: Command, *files: int) -> Fork:
        with self._lock:
            fork = _order(self._connect, command, files)
        fork.pid  # noqa: B018 - it runs when this returns, as with subprocess.Popen
        return fork

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, *self._arguments],
                    # Also its stdout, so that the object in front of it, which forks keep, takes it for no file and no terminal.
                    stdin=theirs.fileno(), stdout=theirs.fileno(),
                    cwd=ROOT, env=self._environment,
                )  # fmt: skip
            atexit.register(process.wait)
            atexit.register(self._socket.close)
        return self._socket


exporting = Template("torch")
"""Where commands that export a model, and the runners of Python, are forked from."""


@dataclass(frozen=True)
class Command:
    """What a fork becomes."""

    options: Sequence[str]
    """Of the interpreter; they end with the module."""
    arguments: Sequence[str]
    cwd: str
    environment: Mapping[str, str]
    files: Sequence[int]
    """Its file descriptors."""
    has_session: bool = False
    umask: int | None = None
    limits: Sequence[tuple[int, Sequence[int]]] = ()


def _of_command(arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Command:
    return Command(["-m", COMMAND], [*map(str, arguments)], str(cwd), {**environment}, [0, 1, 2])


def _order(connect: Callable[[], socket.socket], command: Command, files: Sequence[int]) -> Fork:
    """Order a fork; nothing but the message is left to do once connected, as the caller may be stopped by a signal."""
    message = json.dumps(asdict(command)).encode()
    assert len(message) < _MAX_BYTES and len(files) == len(command.files) < _MAX_FILES
    status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(connect(), [message], [*files, theirs.fileno()])
    return Fork(command.arguments, status)


def fork_forkservers(address: str) -> None:
    """Let this process, a forked server, order its forkservers at the door instead of starting them."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    expected = _read_at_start(kept | OF_FORKSERVERS)

    class Popen(subprocess.Popen[Any]):
        def __new__(cls, args: Sequence[str] = (), *more: Any, **options: Any) -> Any:
            command = [*args]
            is_torchs = command[1:4] == ["-P", "-m", FORKSERVER] and WARM in command
            if not is_torchs or _read_at_start(options["env"]) != expected:
                return super().__new__(cls)
            os.umask(umask := os.umask(0))
            limits = [(number, resource.getrlimit(number)) for number in _LIMITS]
            files = [0, 1, 2, *options["pass_fds"]]
            order = Command(command[1:4], command[4:], str(options["cwd"]), options["env"], files, True, umask, limits)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, Path(os.devnull).open() as null:

                def connect() -> socket.socket:
                    connection.connect(address)
                    return connection

                return _order(connect, order, [null.fileno(), *files[1:]])

    subprocess.Popen = Popen  # type: ignore[misc]


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def main(arguments: Sequence[str]) -> int:
    """Serve until the socket is closed; in a fork, run its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to pytest, which ends this process
    number = arguments.index(DOOR)
    modules, toolchain = arguments[:number], arguments[number + 1 :]
    opens = modules[:1] != [_SOCKETS]
    if opens:
        requests, door = socket.socket(fileno=os.dup(0)), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No path in the file system would be left behind by a process that is killed.
        door.bind(address := f"\0etfarm.tests.{os.getpid()}")
        door.listen()
    else:
        requests, door = (socket.socket(fileno=int(descriptor)) for descriptor in modules[1:])
        sys.modules["pyarrow"] = cast(ModuleType, None)  # as in a forkserver: pandas would import it, and it starts a thread
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    load(modules if opens else toolchain)
    gc.freeze()
    ordered = serve(requests, door, toolchain if opens else ())
    if ordered is None:
        return 0
    command, files = ordered
    requests.close()
    door.close()
    become(command, files)
    if opens:
        fork_forkservers(address)
    runpy.run_module(command.options[-1], run_name="__main__", alter_sys=True)
    return 0


def load(modules: Sequence[str]) -> None:
    """Load modules without starting a thread; of torch also what a command that exports a model loads."""
    for name in modules:
        importlib.import_module(name)
        if name == "torch":
            sys.modules[name].set_num_threads(1)
            importlib.import_module("tqdm").tqdm.monitor_interval = 0  # its monitor is a thread
    if "torch" in modules:
        torch = sys.modules["torch"]
        program = torch.export.export(torch.nn.Linear(1, 1).eval(), (torch.zeros(1, 1),))
        torch.export.save(program, io.BytesIO())
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would lack the other threads"
    assert "etfarm" not in sys.modules, "a command loads its own"


def serve(requests: socket.socket, door: socket.socket, toolchain: Sequence[str]) -> tuple[Command, list[int]] | None:
    """Fork for each request, and report the ends of forks; return the command in its fork, and None when the socket is closed.

    A caller that no longer listens for a fork is no error.

    Args:
        door: where forkservers are ordered.
        toolchain: modules of another process, which takes these orders and begins with the first; empty if this is it.
    """
    forks: dict[int, tuple[int, socket.socket]] = {}
    events = select.poll()
    events.register(requests, select.POLLIN)
    events.register(door, select.POLLIN)
    opened: tuple[subprocess.Popen[bytes], socket.socket] | None = None
    while True:
        for descriptor, _ in events.poll():
            if descriptor in forks:
                pid, reports = forks.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                with reports, contextlib.suppress(ConnectionError):
                    reports.send(str(os.waitstatus_to_exitcode(status)).encode())
                events.unregister(descriptor)
                os.close(descriptor)
                continue
            if descriptor == door.fileno() and toolchain:
                events.unregister(door)
                opened = _open(door, toolchain)
                door.close()  # so that orders fail if the other process ends
                continue
            connection = door.accept()[0] if descriptor == door.fileno() else requests
            message, received, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_FILES)
            if connection is not requests:
                connection.close()
            elif not message:
                for pidfd in forks:
                    for number in (signal.SIGTERM, signal.SIGCONT):
                        signal.pidfd_send_signal(pidfd, number)
                if opened is not None:
                    opened[1].close()
                    opened[0].wait()
                return None
            if not message:
                continue  # the server was killed before it ordered
            if (pid := os.fork()) == 0:
                return Command(**json.loads(message)), received[:-1]
            pidfd, reports = os.pidfd_open(pid), socket.socket(fileno=received.pop())
            for file in received:
                os.close(file)
            with contextlib.suppress(ConnectionError):
                socket.send_fds(reports, [str(pid).encode()], [pidfd])
            forks[pidfd] = pid, reports
            events.register(pidfd, select.POLLIN)


def _open(door: socket.socket, toolchain: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that forkservers are forked from; return it with the socket that it ends with."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        sockets = theirs.fileno(), door.fileno()
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, _SOCKETS, *map(str, sockets), DOOR, *toolchain],
            stdin=subprocess.DEVNULL, stdout=theirs.fileno(), pass_fds=sockets,
            env=kept | OF_FORKSERVERS,
        )  # fmt: skip
    return process, ours


def become(command: Command, files: Sequence[int]) -> None:
    """Give this process what a command has when it begins."""
    free = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FREE) for file in files]
    for number, file in zip(command.files, free, strict=True):
        os.dup2(file, number)
    for first, last in itertools.pairwise((-1, *sorted(command.files), os.sysconf("SC_OPEN_MAX"))):
        if last > first + 1:  # an empty range from 0 would close everything
            os.closerange(first + 1, last)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command.has_session:
        os.setsid()
    if command.umask is not None:
        os.umask(command.umask)
    for number, limit in command.limits:
        resource.setrlimit(number, (limit[0], limit[1]))
    os.environ.clear()
    os.environ.update(command.environment)
    os.chdir(command.cwd)
    if "-P" not in command.options:
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = [str(Path.cwd()), *(folder for folder in path if folder and folder not in sys.path)]
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(len(os.sched_getaffinity(0)))
    sys.argv[1:] = command.arguments
    sys.orig_argv[1:] = [*command.options, *command.arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
