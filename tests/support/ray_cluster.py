"""A Ray cluster on 127.0.0.1 with token authentication, whose nodes are processes of the test and end with it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from etfarm.wire.sandbox import seccomp, syscalls

ROOT: Final = Path(__file__).resolve().parents[2]
_OBJECT_STORE_BYTES: Final = 100_000_000
_START_S: Final = 120.0
_STARTED: Final = "Ray runtime started."
_LAUNCH: Final = """
import ray._private.node, ray._private.ray_constants, ray._private.services
ray._private.ray_constants.ENABLE_RAY_CLUSTER = True
ray._private.services.get_node_ip_address = lambda address=None: "127.0.0.1"
ray._private.node.Node.start_api_server = lambda self, **options: None
from ray.scripts.scripts import main
main()
"""
"""`ray` with nodes at 127.0.0.1, which Ray replaces by the address of a network interface on Linux. What Ray supports on macOS,
one node at 127.0.0.1, is what its processes are set to. Without a dashboard, Ray's API server only counts users."""


class RayNode:
    """A node of a cluster: a supervisor, and all of Ray's processes below it."""

    def __init__(
        self,
        python: Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int],
        refused: Sequence[str] = (),
    ) -> None:
        limits = [",".join(map(str, cores)), ",".join(refused)]
        command = [str(python), "-m", "tests.support.ray_cluster", *limits, *arguments]
        # In a session of its own: a signal to the test's group would end the supervisor alone.
        self._supervisor = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_until_started(self) -> None:
        assert self._supervisor.stdout is not None
        readable, _, _ = select.select([self._supervisor.stdout], [], [], _START_S)
        line = self._supervisor.stdout.readline() if readable else ""
        if line.strip() != _STARTED:
            raise AssertionError(f"the Ray node did not start: {line + self.end()}")

    @property
    def pids(self) -> dict[str, int]:
        """Return the node's processes: names of executables with their process ids."""
        return {child.name(): child.pid for child in psutil.Process(self._supervisor.pid).children(recursive=True)}

    def actors(self) -> list[psutil.Process]:
        """Return the processes of etfarm's actors on the node."""
        if self._supervisor.poll() is not None:
            return []
        processes = psutil.Process(self._supervisor.pid).children(recursive=True)
        return [each for each in processes if _title_of(each).startswith("ray::NodeActor")]

    def kill(self) -> None:
        """Kill all processes of the node at once, as a power cut would."""
        for child in psutil.Process(self._supervisor.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.end()

    def end(self) -> str:
        """End it, and return what it said that nobody has read."""
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None
        self._supervisor.stdin.close()
        self._supervisor.wait(30)
        unread = "" if self._supervisor.stdout.closed else self._supervisor.stdout.read()
        self._supervisor.stdout.close()
        return unread


def _title_of(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


class RayCluster:
    """A head without capacity for work and the nodes that a test adds.

    Args:
        folder: for all files of the cluster; its path must be short, since those of sockets are limited.
        variables: additional environment variables of the nodes.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        # Ray starts its processes by shell commands that do not quote the path of Python, which may have spaces.
        prefix = folder / "venv"
        prefix.symlink_to(sys.prefix)
        self._python = prefix / Path(sys.executable).relative_to(sys.prefix)
        self._gcs, self._client = _free_ports(2)
        self.address = f"ray://127.0.0.1:{self._client}"
        self.credentials = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """The environment variables that a client of the cluster needs."""
        self._environment = {
            **os.environ, **self.credentials,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # see _LAUNCH
            "RAY_memory_monitor_refresh_ms": "0",  # the machine's memory is not the test's
            "RAY_enable_metrics_collection": "0",
            "RAY_raylet_start_wait_time_s": "100",  # 30 by default, which a busy machine exceeds
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            "RAY_worker_niceness": "0",  # 15 by default, with which other work of the machine leaves little to the nodes
            **variables,
        }  # fmt: skip
        self.nodes: list[RayNode] = []
        """The head, and all nodes that were started, also those that have ended."""

    def start(self, cores: Sequence[int] = ()) -> None:
        """Start the head, which has no cpus, so that nothing is compiled on it."""
        self._start(
            ["--head", f"--port={self._gcs}", f"--ray-client-server-port={self._client}", f"--temp-dir={self.folder}/r",
             "--include-dashboard=false", "--no-monitor", "--num-cpus=0"], {}, cores,
        )  # fmt: skip

    def add_node(
        self,
        *,
        cpus: int = 1,
        cores: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
        refused: Sequence[str] = (),
    ) -> RayNode:
        """Start a node and return it once it has joined.

        Args:
            cores: the processor's cores that the node may use; all if empty.
            refused: system calls that the node's host refuses, as container runtimes do.
        """
        return self._start([f"--address=127.0.0.1:{self._gcs}", f"--num-cpus={cpus}"], variables or {}, cores, refused)

    def _start(
        self, arguments: Sequence[str], variables: Mapping[str, str], cores: Sequence[int], refused: Sequence[str] = ()
    ) -> RayNode:
        common = ["--node-ip-address=127.0.0.1", f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats",
                  "--min-worker-port=0", "--max-worker-port=0",
                  "--include-log-monitor=false"]  # fmt: skip  # reads all logs of the host all the time, and etfarm reads none
        node = RayNode(self._python, [*arguments, *common], self._environment | dict(variables), cores, refused)
        self.nodes.append(node)
        node.wait_until_started()
        return node

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.end()


@contextmanager
def running_cluster(variables: Mapping[str, str] | None = None) -> Iterator[RayCluster]:
    """Yield a cluster that is not started yet; end its processes and delete its files afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ry", dir="/tmp"))
    folder.chmod(0o755)
    cluster = RayCluster(folder, variables or {})
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _supervise(cores: str, refused: str, arguments: Sequence[str]) -> None:
    """Run `ray start` until stdin ends, then kill every process below this one."""
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if refused:
        syscalls.forbid_new_privileges()
        seccomp.install(seccomp.Policy(dict.fromkeys(refused.split(","), errno.EPERM)))
    syscalls.adopt_orphans()
    command = [sys.executable, "-c", _LAUNCH, "start", "--block", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        output: bytes | None = b""
        events = select.poll()
        events.register(0, select.POLLIN | select.POLLHUP)
        events.register(started.stdout, select.POLLIN)
        while not any(descriptor == 0 for descriptor, _ in events.poll()):
            block = os.read(started.stdout.fileno(), 65536)
            if not block:
                events.unregister(started.stdout)
            if output is not None:
                output += block
                if _STARTED.encode() in output:
                    print(_STARTED, flush=True)
                    output = None
                elif not block:
                    print(output.decode(errors="replace"), flush=True)
        _kill_all()
    if "--head" in arguments:
        _delete(Path(os.environ["TMPDIR"]))


def _delete(folder: Path) -> None:
    """Delete the cluster's files, which its nodes may still write where the owner was killed: their supervisors end them, too."""
    until_s = time.monotonic() + 10
    while folder.exists() and time.monotonic() < until_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.2)


def _kill_all() -> None:
    own = psutil.Process()
    while children := own.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end of stdin ends it
    _supervise(sys.argv[1], sys.argv[2], sys.argv[3:])
