"""Daemons and commands that are forked are as those that a user starts, and end with the tests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.farm import START_S, Daemon
from tests.support.forks import COMMAND, FORKSERVER, OF_FORKSERVERS, ROOT, WARM, Fork, Template

STATE = """
import json, os, signal, sys, threading, warnings
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv[1:], "flags": repr(sys.flags), "path": sys.path, "cwd": os.getcwd(),
    "main": [__name__, __spec__.name, sys.modules["__main__"].__file__], "environment": {**os.environ},
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1], "threads": threading.active_count(),
    "handlers": {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "groups": [os.getpgrp(), os.getsid(0)],
    "limits": open("/proc/self/limits").read(), "warnings": str(warnings.filters), "umask": os.umask(0o077),
    "streams": [[s.isatty(), s.seekable(), s.encoding, s.errors, s.line_buffering] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "gc": __import__("gc").isenabled(), "children": open("/proc/thread-self/children").read(),
}), flush=True)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""


SERVER = f"""
import os, subprocess, sys
pipe = os.pipe()
kept = {{name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "PYTHONPATH") if name in os.environ}}
os.umask(0o027)
arguments = [sys.executable, "-P", "-m", {FORKSERVER!r}, *map(str, pipe), {WARM!r}]
with open(os.devnull) as null:
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, pass_fds=pipe, cwd=sys.argv[1], env=kept | {OF_FORKSERVERS}, start_new_session=True
    )
is_child = process.pid in map(int, open("/proc/thread-self/children").read().split())
ends = process.wait(), process.poll()  # before anything is printed: the child's line is longer than a pipe takes at once
print("child", is_child, flush=True)
print("ends", *ends, flush=True)
"""


def make_command(folder: Path, code: str, module: str = COMMAND) -> dict[str, str]:
    """Return the variables with which the command is this code."""
    package = folder
    for name in module.split(".")[:-1]:
        package /= name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").touch()
    (package / f"{module.rpartition('.')[2]}.py").write_text(code)
    return {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def finish(daemon: Daemon) -> tuple[dict[str, object], int, str]:
    daemon.start()
    state = json.loads(daemon.expect("{"))
    assert daemon.process is not None and daemon.process.stdin is not None
    daemon.process.stdin.write("typed")
    code = daemon.stop()
    return state, code, daemon.log.read_text()


def differences(started: dict[str, object], forked: dict[str, object]) -> dict[str, tuple[object, object]]:
    return {key: (started.get(key), forked.get(key)) for key in started | forked if started.get(key) != forked.get(key)}


def test_a_forked_daemon_is_as_one_that_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in make_command(tmp_path, STATE).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Daemon, "template", Template("asyncio"))
    started, forked = (
        Daemon(["a b", "ü"], tmp_path / str(executes), {"OWN": "é\udcff"}, executes=executes) for executes in (True, False)
    )
    expected, seen = finish(started), finish(forked)
    assert isinstance(forked.process, Fork) and isinstance(started.process, subprocess.Popen)
    assert differences(expected[0], seen[0]) == {}
    assert seen[1:] == expected[1:] == (7, "typed\n")


def test_a_forked_server_has_a_forked_forkserver_that_is_as_one_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = STATE.replace("[os.getpgrp(), os.getsid(0)]", "[os.getpgrp() == os.getsid(0) == os.getpid()]")
    make_command(tmp_path, own, FORKSERVER)
    monkeypatch.setenv("PYTHONPATH", make_command(tmp_path, SERVER)["PYTHONPATH"])
    monkeypatch.setattr(Daemon, "template", Template("asyncio", toolchain=["asyncio"]))
    seen = {}
    for executes in (True, False):
        daemon = Daemon([str(tmp_path)], tmp_path / str(executes), executes=executes)
        daemon.start()
        daemon.expect("ends")
        (state,) = (json.loads(line) for line in daemon.lines if line.startswith("{"))
        seen[executes] = state, daemon.lines[-1], daemon.stop(), daemon.log.read_text()
        assert f"child {executes}" in daemon.lines
    assert differences(seen[True][0], seen[False][0]) == {}
    assert seen[True][1:] == seen[False][1:] == ("ends 7 7", 0, "\n")


def test_what_is_read_at_the_start_is_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Daemon, "template", Template())
    daemon = Daemon(["--version"], tmp_path / "log", {"PYTHONDEVMODE": "1"})
    daemon.start()
    assert isinstance(daemon.process, subprocess.Popen) and daemon.stop() == 0


def test_a_signal_reaches_a_fork_and_nothing_after_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Daemon, "template", Template())
    daemon = Daemon(["serve", "--data", str(tmp_path / "data")], tmp_path / "log")
    daemon.start()
    assert isinstance(daemon.process, Fork) and daemon.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.process.wait(0)
    daemon.kill9()
    assert daemon.process.poll() == daemon.process.wait() == daemon.stop() == -signal.SIGKILL
    assert not Path(f"/proc/{daemon.pid}").exists(), "it was not reaped"
    daemon.signal(signal.SIGTERM)


def test_forks_end_with_tests_that_are_killed(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from tests.support.forks import Template
fork = Template().start([], {make_command(tmp_path, "import signal; signal.pause()")}, sys.stderr)
print(fork.poll(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The fork and what it was forked from have its stderr, and so keep it open while they run.
    tests = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert (tests.returncode, tests.stdout) == (-signal.SIGKILL, "None\n")
