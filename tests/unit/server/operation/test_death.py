"""What a server leaves behind by which its successor knows whether a job may have ended it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from etfarm.server.jobs.takeups import IN_HAND
from etfarm.server.operation.death import KILLS, Evidence


def segfault() -> None:
    ctypes.string_at(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_order() -> None:
    """End without an error."""


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

    def server(self, end: Callable[[], None]) -> tuple[list[str], int]:
        """Run a server; return the jobs that its predecessor's death counts for, and how it ended itself."""
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            evidence = Evidence(self.data, vmstat=self.vmstat, boot_id=self.boot_id)
            os.write(writing, " ".join(evidence.find_suspects()).encode())
            (self.data / IN_HAND / "job").touch()
            end()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            suspects = pipe.read().split()
        return suspects, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_fault_of_the_process_is_evidence_once(machine: Machine) -> None:
    assert machine.server(segfault) == ([], -signal.SIGSEGV)
    assert machine.server(os.abort) == (["job"], -signal.SIGABRT)
    assert machine.server(in_order) == (["job"], 0)
    assert machine.server(in_order) == ([], 0)


def test_a_kill_from_outside_is_none(machine: Machine) -> None:
    assert machine.server(killed) == ([], -signal.SIGKILL)
    assert machine.server(in_order) == ([], 0)


def test_a_kill_by_the_kernel_without_memory_is_evidence(machine: Machine) -> None:
    machine.server(killed)
    machine.oom_kills(28)
    assert machine.server(killed)[0] == ["job"]
    assert machine.server(killed)[0] == []


def test_kills_before_the_machine_started_again_are_none(machine: Machine) -> None:
    machine.server(killed)
    machine.oom_kills(28)
    machine.boot_id.write_text("b\n")
    assert machine.server(in_order)[0] == []


def test_a_kernel_that_does_not_count_gives_no_evidence(machine: Machine) -> None:
    machine.vmstat.unlink()
    machine.server(killed)
    assert machine.server(in_order)[0] == []


async def test_what_the_kernel_killed_while_the_server_lived_on_is_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etfarm.server.operation.death.REFRESH_S", 0.0)
    machine.oom_kills(28)
    watching = asyncio.create_task(Evidence(machine.data, vmstat=machine.vmstat, boot_id=machine.boot_id).watch())
    kills = machine.data / KILLS
    while not kills.exists() or kills.read_text() != "a 28":  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)
    watching.cancel()
    assert machine.server(in_order)[0] == []
