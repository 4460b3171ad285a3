"""The process that `etfarm agent --allow-upgrade` becomes: it runs the agent in the version that the data folder names.

It keeps the process id that a supervisor knows, and switches the version: an agent that has installed a wheel ends with RESTART,
and the launcher starts the wheel's agent. If that has not connected in time, or ends before, the former version is started
again. Stdlib only, so that it needs little memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from etfarm.device_agents.daemon.versions import State, Version, Versions
from etfarm.device_agents.jail.secrets import forget_variable, hide_memory
from etfarm.wire.names import TOKEN_VARIABLE

RESTART: Final = 86
"""Exit code of an agent that is to be started again, in the version that is tried next."""
CONNECTED_VARIABLE: Final = "ETFARM_AGENT_CONNECTED_FD"
"""Variable with the descriptor that an agent writes to once it has connected; set for agents that a launcher started."""
BASE_VARIABLE: Final = "ETFARM_AGENT_BASE"
"""Variable with the version of the installation, which an agent of a wheel cannot find out by itself."""
UPGRADE_VARIABLE: Final = "ETFARM_AGENT_UPGRADE"
"""Variable with the id of the upgrade whose version is tried."""

_END_S: Final = 15.0
"""How long an agent may take to end after SIGTERM."""
_PR_SET_PDEATHSIG: Final = 1


class Launcher:
    """The agent's parent.

    Args:
        versions: the versions that may run.
        arguments: the arguments of `etfarm agent`.
        environment: the agent's environment, with its token.
        base: the version of the installation.
    """

    def __init__(self, versions: Versions, arguments: Sequence[str], environment: Mapping[str, str], base: str) -> None:
        self._base = base
        self._versions = versions
        self._arguments = arguments
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None
        self._ending = 0
        """The signal that ends this process; 0 without one."""

    def run(self) -> int:
        """Run agents until one ends for another reason than an upgrade; return its exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._forward)
        while True:
            state = self._versions.read()
            if state.trial is not None:
                code = self._try(state, state.trial)
            else:
                self._versions.tidy(state)
                code = self._start(state.current).wait()
            if code == RESTART and not self._ending:
                continue
            return code if code >= 0 else 128 - code

    def _try(self, state: State, trial: Version) -> int:
        """Start a new version. Return its exit code once it has connected; RESTART after it was given up for the former one."""
        if not self._versions.path(trial).is_dir():
            return self._give_up(state, trial, "is gone from the disk")
        _say(f"starting etfarm {trial.version}")
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", buffering=0) as connected:
            child = self._start(trial, writer)
            os.close(writer)
            why = self._await_connection(child, connected.fileno(), trial.time_limit_s)
        if why is None:
            outcome = {"upgrade_id": trial.upgrade_id, "version": trial.version}
            self._versions.write(replace(state, current=trial, trial=None, outcome=outcome))
            _say(f"etfarm {trial.version} has connected")
            return child.wait()
        _end(child)
        return self._give_up(state, trial, why)

    def _give_up(self, state: State, trial: Version, why: str) -> int:
        outcome = {"upgrade_id": trial.upgrade_id, "version": trial.version, "error": why}
        # Whatever ends this process: the version is tried once.
        self._versions.write(replace(state, trial=None, outcome=outcome))
        _say(f"etfarm {trial.version} {why}; starting {state.current.version if state.current else state.base} again")
        return RESTART

    def _await_connection(self, child: subprocess.Popen[bytes], connected: int, limit_s: float) -> str | None:
        """Wait until a new version has connected; return None, or why it does not."""
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select([connected], [], [], min(left_s, 0.5))
            if ready and os.read(connected, 1):
                return None
            if (code := child.poll()) is not None:
                return f"ended with exit code {code} before it had connected"
            if ready:  # the agent has closed its end, and goes on without it
                time.sleep(0.1)
        return f"has not connected within {limit_s:g} s"

    def _start(self, chosen: Version | None, connected: int | None = None) -> subprocess.Popen[bytes]:
        environment = dict(self._environment)
        # Any value tells the agent that a launcher waits for its exit code.
        environment[BASE_VARIABLE] = self._base
        environment[CONNECTED_VARIABLE] = str(-1 if connected is None else connected)
        if chosen is not None:
            paths = [str(self._versions.path(chosen)), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            if connected is not None:
                environment[UPGRADE_VARIABLE] = chosen.upgrade_id
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "etfarm.wire.command", "agent", *self._arguments],
            env=environment, pass_fds=() if connected is None else (connected,), preexec_fn=_die_with_parent,
        )  # fmt: skip
        if self._ending:
            self._child.send_signal(self._ending)
        return self._child

    def _forward(self, number: int, _: object) -> None:
        self._ending = number
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)


def main(arguments: Sequence[str]) -> int:
    """Run `etfarm agent ARGUMENTS` under a launcher.

    Args:
        arguments: the absolute path of the data folder, then the arguments of `etfarm agent`.
    """
    data, *rest = arguments
    environment = dict(os.environ)
    forget_variable(TOKEN_VARIABLE)
    hide_memory()
    base = version("etfarm")
    return Launcher(Versions(Path(data), base), rest, environment, base).run()


def become(data: Path, arguments: Sequence[str]) -> None:
    """Replace this process by the launcher, which keeps its process id. Does not return."""
    # -P: nothing is imported from the working folder, to which others may write.
    module = "etfarm.device_agents.daemon.launcher"
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, str(data.absolute()), *arguments])


def base_version() -> str:
    """Return the version of the installation, also in an agent of a wheel."""
    return os.environ.get(BASE_VARIABLE) or version("etfarm")


def is_launched() -> bool:
    """Return whether a launcher started this process."""
    return CONNECTED_VARIABLE in os.environ


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(text: str) -> None:
    print(f"etfarm agent: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
