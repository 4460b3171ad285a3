"""The check of the embedded farm of `etfarm doctor`: processes that keep a farm from starting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from etfarm.client.checks import check_embedded_farm
from etfarm.client.embedded.lease import Place
from etfarm.wire.doctor import Status

HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

SUPERVISE = """
import contextlib, fcntl, socket, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen()
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(100)
        connection.sendall(b"{}")
"""
"""The end of an embedded farm's supervisor that the check sees."""


def test_without_a_farm_nothing_is_wrong_and_nothing_is_created(tmp_path: Path) -> None:
    (finding,) = check_embedded_farm(Place(tmp_path / "farm"))
    assert finding.status is Status.OK and finding.detail.startswith("none has run in ")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_holds_a_lock_is_named_and_what_it_left_behind_is_fine(tmp_path: Path) -> None:
    place = Place(tmp_path / "farm")
    place.make()
    for name in ("lock", "running"):
        command = [sys.executable, "-c", HOLD, str(place.data / name)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None and holder.stdin is not None
            assert holder.stdout.readline() == "held\n"
            (finding,) = check_embedded_farm(place, patience_s=0.3)
            holder.stdin.close()
        assert finding.status is Status.MISSING
        assert f"Held by: {holder.pid} (" in finding.detail and str(place.data) in finding.detail
        assert f"`kill -9 {holder.pid}`" in finding.remedy
        (finding,) = check_embedded_farm(place, patience_s=0.3)
        assert (finding.status, finding.detail) == (Status.OK, f"not running; its folder is {place.data}")


def test_a_lock_that_is_let_go_meanwhile_is_no_obstacle(tmp_path: Path) -> None:
    place = Place(tmp_path / "farm")
    place.make()
    command = [sys.executable, "-c", HOLD.replace("sys.stdin.read()", "import time; time.sleep(1)"), str(place.data / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        (finding,) = check_embedded_farm(place, patience_s=30)
    assert finding.status is Status.OK


def test_a_stopped_supervisor_is_named(tmp_path: Path) -> None:
    place = Place(tmp_path / "farm")
    place.make()
    command = [sys.executable, "-c", SUPERVISE, str(place.data / "running"), str(place.supervisor_socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            (stopped,) = check_embedded_farm(place, patience_s=0.3)
        finally:
            os.kill(process.pid, signal.SIGCONT)
        (answering,) = check_embedded_farm(place, patience_s=30)
        process.terminate()
    assert stopped.status is Status.MISSING and f"`kill -9 {process.pid}`" in stopped.remedy
    assert (answering.status, answering.detail) == (Status.OK, f"runs in {place.data}")
