"""What a server leaves behind by which its successor knows whether a job may have ended it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etfarm.server.jobs.takeups import IN_HAND
from etfarm.server.operation.death import FRESH_S, KILLS, Evidence
from tests.support.waiting import becomes

SEGFAULT, ABORT = "ctypes.string_at(0)", "os.abort()"
KILLED, IN_ORDER = "os.kill(os.getpid(), signal.SIGKILL)", ""
SERVER = """
import ctypes, os, signal, sys
from pathlib import Path
from etfarm.server.jobs.takeups import forget_uncounted
from etfarm.server.operation.death import Evidence
data, vmstat, boot_id, in_hand = map(Path, sys.argv[1:])
print(*Evidence(data, vmstat=vmstat, boot_id=boot_id).find_suspects(), flush=True)
if not (data / "unreachable").exists():
    forget_uncounted(data)  # as a server that has counted them
(in_hand / "job").touch()
"""


class Machine:
    """The data folder of a server, which handles a job whenever it ends, and the kernel's counters."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        (self.data / IN_HAND).mkdir(parents=True)
        self.vmstat, self.boot_id = folder / "vmstat", folder / "boot_id"
        self.boot_id.write_text("a\n")
        self.oom_kills(27)

    def oom_kills(self, number: int) -> None:
        self.vmstat.write_text(f"pgfault 7\noom_kill {number}\nzswpin 0\n")

    def server(self, end: str) -> tuple[list[str], int]:
        """Run a server up to a statement; return the jobs that its predecessor's death counts for, and how it ended itself."""
        paths = [self.data, self.vmstat, self.boot_id, self.data / IN_HAND]
        done = subprocess.run(
            [sys.executable, "-c", f"{SERVER}{end}", *map(str, paths)], stdout=subprocess.PIPE, text=True, check=False, timeout=60
        )
        return done.stdout.splitlines()[-1].split(), done.returncode  # its log comes first


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_fault_of_the_process_is_evidence_once(machine: Machine) -> None:
    assert machine.server(SEGFAULT) == ([], -signal.SIGSEGV)
    assert machine.server(ABORT) == (["job"], -signal.SIGABRT)
    assert machine.server(IN_ORDER) == (["job"], 0)
    assert machine.server(IN_ORDER) == ([], 0)


def test_a_kill_from_outside_is_none(machine: Machine) -> None:
    assert machine.server(KILLED) == ([], -signal.SIGKILL)
    assert machine.server(IN_ORDER) == ([], 0)


def test_a_kill_by_the_kernel_without_memory_is_evidence(machine: Machine) -> None:
    machine.server(KILLED)
    machine.oom_kills(28)
    assert machine.server(KILLED)[0] == ["job"]
    assert machine.server(KILLED)[0] == []


def test_kills_before_the_machine_started_again_are_none(machine: Machine) -> None:
    machine.server(KILLED)
    machine.oom_kills(28)
    machine.boot_id.write_text("b\n")
    assert machine.server(IN_ORDER)[0] == []


def test_a_kernel_that_does_not_count_gives_no_evidence(machine: Machine) -> None:
    machine.vmstat.unlink()
    machine.server(KILLED)
    assert machine.server(IN_ORDER)[0] == []


async def test_what_the_kernel_killed_while_the_server_lived_on_is_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.operation.death.REFRESH_S", 0.0)
    machine.oom_kills(28)
    watching = asyncio.create_task(Evidence(machine.data, vmstat=machine.vmstat, boot_id=machine.boot_id).watch())
    kills = machine.data / KILLS
    await becomes(lambda: kills.exists() and kills.read_text() == "a 28")
    watching.cancel()
    assert machine.server(IN_ORDER)[0] == []


def test_evidence_outlives_servers_that_do_not_reach_the_database(machine: Machine) -> None:
    machine.server(ABORT)
    (machine.data / "unreachable").touch()
    for _ in range(2):
        assert machine.server(KILLED)[0] == ["job"]
    (machine.data / "unreachable").unlink()
    assert machine.server(KILLED)[0] == ["job"]
    assert machine.server(KILLED)[0] == []


def test_kills_long_after_the_last_look_are_none(machine: Machine) -> None:
    machine.server(KILLED)
    machine.oom_kills(28)
    then_s = time.time() - FRESH_S
    os.utime(machine.data / KILLS, (then_s, then_s))
    assert machine.server(IN_ORDER)[0] == []
