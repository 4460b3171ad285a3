"""A real farm for tests: `etfarm serve` and `etfarm agent` as processes of their own, with one verb for each fault."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from typing import Any, ClassVar, Self

import psutil

from etfarm.client import Farm
from etfarm.client.models import DeviceState
from etfarm.device_agents.daemon.own_runners import REMEMBERED
from tests.support.credentials import ADMIN, Credentials
from tests.support.forks import COMMAND, Fork, Template, exporting
from tests.support.runner import know_own_runners, runner_archive

START_S = 120.0
"""How long a process may take until it says the line that is waited for, on a busy machine."""
WAIT_FOR_NOTHING = ("--idle-wait", "0", "--cool-wait", "0", "--cool-down", "0")
"""An agent that measures at once: other tests keep the machine busy, so each measurement would wait the whole 10 s for it to
become idle. What the gates do is tested in
tests/unit/device_agents/conditions/test_gates.py and tests/rpc/test_agent.py, an agent with its defaults in
tests/e2e/test_main_job.py."""
ALONE = ("--listen", "127.0.0.1:0", "--no-bundle", "--no-prewarm", "--exit-with-stdin")
"""A server on a port of the system's choice, without runners and warm workers, that ends with its test."""
EXPORTING = ("bench", "compile")
"""Commands that load torch, if their model is not compiled yet."""
TOLERANT_HEALTH = Path(__file__).with_name("tolerant_health.toml")
"""Rules of health by which no device is quarantined for its faults."""
LAUNCHER = b"sandbox/launch.py"
"""In the command line of a process that confines itself before it becomes a runner."""
PROMPTLY_S = 15.0
"""For what must happen at once: far below what would end it otherwise, and virtual machines stand still for seconds."""


class Daemon:
    """One process of etfarm whose stdout is read line by line; it ends with its stdin, so never outlives the test.

    Args:
        within: what stands before the command and becomes it.
        python: the interpreter.
        executes: whether it must be a process as a user starts it, whose memory, limits, children, and files in /proc are its
            own; others are forked from the template, and their forkservers are.
    """

    template: ClassVar[Template | None] = None
    """What the tests' daemons are forked from. Benches have none: they measure processes as users start them."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        within: Sequence[str] = (),
        python: str | Path = sys.executable,
        *,
        executes: bool = False,
    ) -> None:
        if list(arguments[:1]) == ["serve"] and "--health-interval" not in arguments:
            # Most tests count the runs of their devices, play their agents, or make them fail.
            arguments = [*arguments, "--health-interval", "0"]
            arguments += [] if "--health" in arguments else ["--health", str(TOLERANT_HEALTH)]
        self._arguments = arguments
        self._started = [*within, str(python), "-m", COMMAND]
        self._executes = executes or self._started[0] != sys.executable
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop("ETFARM_SERVER", None)
        self.log = log
        self.lines: list[str] = []
        self._queue: Queue[str | None] = Queue()
        self.process: subprocess.Popen[str] | Fork | None = None

    def start(self) -> None:
        """Start it; what it printed before is forgotten."""
        self.lines, self._queue = [], Queue()
        with self.log.open("a") as errors:
            if self.template is not None and not self._executes and self.template.suits(self._environment):
                self.process = self.template.start(self._arguments, self._environment, errors)
            else:
                self.process = subprocess.Popen(
                    [*self._started, *self._arguments],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=self._environment,
                )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process, self._queue), daemon=True).start()

    def _read(self, process: subprocess.Popen[str] | Fork, queue: Queue[str | None]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                queue.put(line.rstrip("\n"))
        queue.put(None)

    def expect(self, text: str, timeout_s: float = START_S) -> str:
        """Wait for a line of stdout that contains `text`; fail with the log when the process ends first."""
        while True:
            try:
                line = self._queue.get(timeout=timeout_s)
            except Empty:
                raise AssertionError(f"no {text!r} within {timeout_s} s; it said {self.lines}; {self.log.read_text()}") from None
            if line is None:
                raise AssertionError(f"it ended before {text!r}; it said {self.lines}; {self.log.read_text()}")
            self.lines.append(line)
            if text in line:
                return line

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        assert self.process is not None
        runs = failure is None and self.process.poll() is None
        assert self.stop() == 0 or not runs, self.log.read_text()[-3000:]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill9(self) -> None:
        """The process is gone at once."""
        assert self.process is not None and self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def stop(self) -> int:
        """End it in order, and return its exit code."""
        if self.process is None:
            return 0
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"it did not end with its stdin; {self.log.read_text()[-3000:]}") from None


def serve(folder: Path, *options: str, **process: Any) -> Daemon:
    """Return a server of a folder, which is alone; `process` are arguments of `Daemon`."""
    return Daemon(["serve", *ALONE, "--data", str(folder / "data"), *options], folder / "serve.log", **process)


def private_file(path: Path, text: str) -> Path:
    """Write a file that only its owner may read, as of tokens."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


class FarmProcess:
    """A server, and the agents that it is given, which end with a `with` statement. `folder` keeps its data over restarts.

    It asks for the credentials that are in use when it is created.

    Args:
        prewarm: whether the server loads the compile toolchain at its start, which takes seconds of CPU time, also where
            nothing is compiled.
        within: what stands before the server's command and becomes it.
        environment: further variables of the server.
        executes: whether its processes must be as a user starts them, as of `Daemon`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bundle: bool = True,
        prewarm: bool = False,
        serve: Sequence[str] = (),
        within: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        executes: bool = False,
    ) -> None:
        self._environment = environment
        self._executes = executes
        self._within = within
        self._prewarm = prewarm
        self.folder = folder
        self._bundle = bundle
        self._credentials = Credentials.in_use
        self._serve_arguments = [*serve, *(self._credentials.serve if self._credentials else ())]
        self.address = ""
        self.server: Daemon | None = None
        self.agents: list[Daemon] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, agents: int = 1) -> FarmProcess:
        """Start the server, offer it the runner, and start agents that have connected when this returns."""
        self.restart()
        self.create_projects()
        if self._bundle:
            self.offer_runner()
        for _ in range(agents):
            self.add_agent()
        return self

    def create_projects(self) -> None:
        """Create the users' projects, where the farm has users; a server with a database of others leads by then."""
        assert self.server is not None
        if "--database" in self._serve_arguments:
            self.server.expect("leading the farm")
        if self._credentials is not None:
            self._credentials.create_projects(self.address)

    def offer_runner(self) -> None:
        """Add the runner to the server's bundles."""
        with self.admin() as farm:
            farm.add_bundle(runner_archive())

    def restart(self) -> None:
        """Start the server, on the port that it had before."""
        listen = self.address or "127.0.0.1:0"
        arguments = ["serve", "--listen", listen, "--data", str(self.folder / "server"), "--exit-with-stdin", "--no-bundle"]
        arguments += [] if self._prewarm else ["--no-prewarm"]
        self.server = Daemon(
            [*arguments, *self._serve_arguments], self.folder / "serve.log", self._environment, self._within,
            executes=self._executes,
        )  # fmt: skip
        self.server.start()
        self.address = self.server.expect("listening on").rpartition(" ")[2]

    def add_agent(
        self, *arguments: str, server: str | None = None, bare: bool = False, environment: dict[str, str] | None = None
    ) -> Daemon:
        """Start an agent with a data folder of its own; it has connected when this returns.

        Args:
            arguments: options of `etfarm agent`, which stand behind WAIT_FOR_NOTHING and so win over it.
            bare: as on a machine that has the agent alone, without torch.
        """
        index = len(self.agents)
        data = self.folder / f"agent-{index}"
        know_own_runners(data)
        if bare and (known := data / REMEMBERED).exists():
            known.write_text(json.dumps(json.loads(known.read_text()) | {"runners": []}))
        if self._credentials is not None:
            environment = self._credentials.new_agent(self.address, f"board-{index}") | (environment or {})
        agent = Daemon(
            ["agent", "--server", server or self.address, "--data", str(data), "--name", f"board-{index}", "--exit-with-stdin",
             *WAIT_FOR_NOTHING, *arguments],
            self.folder / f"agent-{index}.log",
            environment, executes=self._executes,
        )  # fmt: skip
        agent.start()
        agent.expect("connected to")
        self.agents.append(agent)
        return agent

    def client(self) -> Farm:
        """Return a client of this farm; use it in a with statement."""
        return Farm(self.address)

    def is_idle(self) -> bool:
        """Return whether all devices of this farm are free."""
        with self.client() as client:
            return all(device.state is DeviceState.IDLE for device in client.devices())

    def admin(self) -> Farm:
        """Return a client of the farm's admin, who everybody is without credentials."""
        return self.client() if self._credentials is None else self._credentials.client(self.address, ADMIN)

    def kill9(self) -> None:
        """The server is gone at once, its agents stay."""
        assert self.server is not None
        self.server.kill9()

    def stop(self) -> None:
        """End all of it."""
        for agent in self.agents:
            if agent.process is not None and agent.process.poll() is None:
                agent.signal(signal.SIGCONT)
            agent.stop()
        if self.server is not None:
            self.server.stop()


def etfarm(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None, timeout_s: float = 480.0
) -> subprocess.CompletedProcess[str]:
    """Run one command of the CLI to its end.

    Without an environment of its own, it is forked: from a process that has loaded torch, if it may export a model.
    """
    clean = {key: value for key, value in os.environ.items() if key != "ETFARM_SERVER"} | {"COLUMNS": "140"}
    template = exporting if arguments[0] in EXPORTING else Daemon.template
    if environment is None and template is not None:
        return template.run(arguments, cwd, clean, timeout_s)
    return subprocess.run(
        [sys.executable, "-m", COMMAND, *arguments],
        cwd=cwd, env={**clean, **(environment or {})}, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def descendants(pid: int) -> set[int]:
    """Return the processes below `pid`, by /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                stat = (entry / "stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    result: set[int] = set()
    queue = [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            result.add(child)
            queue.append(child)
    return result


def runners(agent_pid: int) -> set[int]:
    """Return the runners of an agent: what is below it but for the launcher that waits to become the next one."""
    return {pid for pid in descendants(agent_pid) if not _is_launcher(pid)}


def launchers(agent_pid: int) -> set[int]:
    """Return the processes below an agent that wait to become runners."""
    return {pid for pid in descendants(agent_pid) if _is_launcher(pid)}


def lives(pid: int) -> bool:
    """Return whether a process runs; one that was killed may wait to be reaped by a slow init."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """Processes that stand still until they are killed, or until the end of the context."""
    stopped = [os.pidfd_open(pid) for pid in pids]
    for pidfd in stopped:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    try:
        yield
    finally:
        for pidfd in stopped:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)


def _is_launcher(pid: int) -> bool:
    try:
        return LAUNCHER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether `condition` comes true in time; for what no event tells of (other processes in /proc)."""
    waiting = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if condition():
            return True
        waiting.wait(0.02)
    return condition()
