"""Kills in each phase of a job: nothing is lost or recorded twice, and the job ends as specified.

Phases of a runner and of a child of the server are held by freezing the process that works in them, so that the death happens
there; the others are hit as soon as they are reported.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from etfarm.v1 import common_pb2, job_pb2, report_pb2
from tests.support import invariants
from tests.support.farm import PROMPTLY_S, FarmProcess, descendants, frozen, launchers, runners, wait_until
from tests.support.farm_calls import farm_calls
from tests.support.programs import program
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="kills servers, agents, runners and children in each phase of a job")

LONG_PHASES = {"warmup": 1000, "iterations": 1000, "min_time_s": 0.3, "trace_iterations": 1000, "threads": 1, "no_cache": True}
"""Phases that last for tenths of a second each, and children that start for each job."""
EXECUTED = ("WARMUP", "TIMED", "TRACED")
"""The phases in which a runner executes the program."""


@dataclass(frozen=True)
class End:
    """How a job with one cell has ended."""

    state: str
    attempts: tuple[str, ...] = ("",)
    """How each attempt ended: a reason, or empty for a result."""
    warnings: frozenset[str] = frozenset()


SUCCESS = End("SUCCEEDED")


class StruckFarm:
    """A farm with one agent, whose processes are killed one after the other."""

    def __init__(self, farm: FarmProcess) -> None:
        self._farm = farm

    @property
    def server_pid(self) -> int:
        assert self._farm.server is not None
        return self._farm.server.pid

    @property
    def agent_pid(self) -> int:
        return self._farm.agents[0].pid

    @contextmanager
    def job_in(self, phase: str) -> Iterator[str]:
        """A job that has reached a phase, in which it stays until the end of the context if a process below works in it."""
        with ExitStack() as held:
            if phase in ("INSPECT", "LOAD"):
                self.run_job()  # starts the forkserver, and tests the runner, which a new process does once
            if phase == "INSPECT":
                held.enter_context(frozen(descendants(self.server_pid)))
            elif phase == "LOAD":
                assert wait_until(lambda: bool(launchers(self.agent_pid)))
                held.enter_context(frozen(launchers(self.agent_pid)))
            job_id = self.submit()
            if phase == "INSPECT":
                assert wait_until(lambda: bool(self.folders_of_children()))
            elif phase != "SUBMITTED":
                self.wait_for(job_id, "TIMED" if phase == "ANALYZE" else phase)
            if phase in EXECUTED:
                held.enter_context(frozen(runners(self.agent_pid)))
            elif phase == "ANALYZE":
                held.enter_context(frozen(descendants(self.server_pid)))
                self.wait_for(job_id, phase)
            yield job_id

    def submit(self) -> str:
        """Submit a job, and return its id."""
        with self._farm.client() as client:
            return client.bench(program("wide").path, **LONG_PHASES).id  # type: ignore[arg-type]

    def run_job(self) -> None:
        """Run a job that nothing disturbs."""
        assert self.end_of(self.submit()) == SUCCESS

    def wait_for(self, job_id: str, phase: str) -> None:
        """Wait until a job has reached a phase."""
        with self._farm.client() as client:
            until_phase(client.job(job_id), phase)

    def folders_of_children(self) -> list[Path]:
        """Return the folders of the server's children that work or wait for their forkserver."""
        return list((self._farm.folder / "server" / "work" / "children").glob("job-*"))

    def kill_server(self) -> None:
        self._farm.kill9()

    def kill_agent(self) -> None:
        self._farm.agents[0].kill9()

    def restart_server(self) -> None:
        self._farm.restart()

    def restart_agent(self) -> None:
        (agent,) = self._farm.agents
        agent.start()
        agent.expect("connected to")

    def drain(self, *, undrain: bool = False) -> None:
        """Let the device take no more runs, or take them again."""
        with self._farm.admin() as client:
            client.undrain_device("board-0") if undrain else client.drain_device("board-0")

    def end_of(self, job_id: str) -> End:
        """Wait for a job's end, require that it is recorded once and without gaps, and return it."""
        job, report = asyncio.run(self._record_of(job_id))
        (cell,) = job.cells
        warnings = frozenset(warning.code for warning in report.compile.warnings)
        attempts = tuple(attempt.error.reason for attempt in cell.attempts)
        assert cell.error.reason == (attempts[-1] if cell.state == common_pb2.CELL_STATE_FAILED else "")
        return End(common_pb2.CellState.Name(cell.state).removeprefix("CELL_STATE_"), attempts, warnings)

    async def _record_of(self, job_id: str) -> tuple[job_pb2.Job, report_pb2.Report]:
        async with farm_calls(self._farm.address) as calls:
            events = await calls.watch(job_id)
            job: job_pb2.Job = await calls.call(calls.jobs.Get, job_pb2.GetJobRequest(job_id=job_id))
            reports = await calls.reports_of(job_id)
            assert invariants.check_events(job, events) == []
            assert invariants.check_reports(job, reports) == []
            assert [known.id for known in await calls.all_jobs()].count(job_id) == 1
        (report,) = reports
        return job, report


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StruckFarm]:
    with FarmProcess(tmp_path_factory.mktemp("struck"), executes=True) as running:
        yield StruckFarm(running.start())
    assert invariants.check_database(running.folder / "server" / "farm.sqlite") == []
    assert not list((running.folder / "agent-0" / "results").iterdir()), "a result that was never acknowledged"


@pytest.mark.parametrize("phase", ["SUBMITTED", "INSPECT", "FETCH", "LOAD", *EXECUTED, "UPLOAD", "ANALYZE"])
def test_a_job_survives_the_death_of_its_server(struck: StruckFarm, phase: str) -> None:
    with struck.job_in(phase) as job_id:
        struck.kill_server()
    struck.restart_server()
    assert struck.end_of(job_id) == SUCCESS


def test_a_job_that_waits_for_a_device_survives_the_death_of_its_server(struck: StruckFarm) -> None:
    struck.drain()
    with struck.job_in("WAIT_FOR_DEVICE") as job_id:
        struck.kill_server()
    struck.restart_server()
    struck.drain(undrain=True)
    assert struck.end_of(job_id) == SUCCESS


@pytest.mark.parametrize("phase", ["FETCH", "LOAD", *EXECUTED, "UPLOAD", "ANALYZE"])
def test_a_run_starts_again_after_the_death_of_its_agent(struck: StruckFarm, phase: str) -> None:
    with struck.job_in(phase) as job_id:
        below = descendants(struck.agent_pid)
        struck.kill_agent()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below)), "a process outlived its agent"
    struck.restart_agent()
    again = End("SUCCEEDED", ("ATTEMPT_LOST", ""))
    # The death may come after the result was written to the disk, which is then sent by the next process.
    assert struck.end_of(job_id) in {"UPLOAD": (SUCCESS, again), "ANALYZE": (SUCCESS,)}.get(phase, (again,))


@pytest.mark.remedy("DEVICE_RUNNER_KILLED")
def test_a_run_starts_again_after_the_death_of_a_runner_that_has_not_loaded_its_program(struck: StruckFarm) -> None:
    with struck.job_in("LOAD") as job_id:
        for pid in launchers(struck.agent_pid):
            os.kill(pid, signal.SIGKILL)
    assert struck.end_of(job_id) == End("SUCCEEDED", ("DEVICE_RUNNER_KILLED", ""))


@pytest.mark.parametrize("phase", EXECUTED)
def test_the_death_of_a_runner_is_its_programs_and_the_device_serves_on(struck: StruckFarm, phase: str) -> None:
    with struck.job_in(phase) as job_id:
        for pid in runners(struck.agent_pid):
            os.kill(pid, signal.SIGKILL)
    assert struck.end_of(job_id) == End("FAILED", ("PROGRAM_CRASHED",))
    struck.run_job()


@pytest.mark.parametrize("phase", ["INSPECT", "ANALYZE"])
def test_a_task_starts_again_after_the_death_of_its_forkserver(struck: StruckFarm, phase: str) -> None:
    with struck.job_in(phase) as job_id:
        for pid in descendants(struck.server_pid):
            os.kill(pid, signal.SIGKILL)
    assert struck.end_of(job_id) == SUCCESS


def test_the_death_of_an_analysis_costs_a_part_of_the_report(struck: StruckFarm) -> None:
    with struck.job_in("ANALYZE") as job_id:
        forkserver = descendants(struck.server_pid)
    children: set[int] = set()

    def has_child() -> bool:
        nonlocal children
        children = descendants(struck.server_pid) - forkserver
        return len(children) == 2  # its supervisor comes first

    assert wait_until(has_child, PROMPTLY_S), "there was no child"
    os.kill(max(children), signal.SIGKILL)
    end = struck.end_of(job_id)
    assert (end.state, end.attempts) == (SUCCESS.state, SUCCESS.attempts) and "ANALYSIS_CUT_SHORT" in end.warnings
