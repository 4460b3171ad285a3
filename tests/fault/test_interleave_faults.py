"""Faults during an attempt that several cells share."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client import Job
from etfarm.client.models import JobState, Progress
from tests.support.farm import PROMPTLY_S, FarmProcess, descendants, runners, wait_until
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="kills farms in the middle of interleaved jobs")


@pytest.fixture(scope="module")
def pair() -> list[Path]:
    return [program("conv").path, program("channels_last").path]


def measured(job: Job) -> None:
    """Wait until the rounds have started."""
    for event in job.watch():
        if isinstance(event, Progress) and event.phase == "TIMED" and event.done:
            return
    raise AssertionError("the job ended before")


def test_cells_of_a_shared_attempt_are_placed_again_together(breakable: FarmProcess, pair: list[Path]) -> None:
    breakable.start()
    dying = breakable.agents[0]
    with breakable.client() as farm:
        job = farm.bench(pair, min_time_s=2.0, interleave=True, profile=False)
        measured(job)
        runners = descendants(dying.pid)
        assert len(runners) >= 2, "one of each candidate"
        dying.kill9()
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in runners)), "a runner outlived its agent"
        dying.start()
        dying.expect("connected to")
        first, second = job.result().reports
        assert (first.state, second.state) == ("SUCCEEDED", "SUCCEEDED")
        assert first.attempt == second.attempt
        assert [cell.attempts for cell in farm.job(job.id).info.cells] == [2, 2]
        assert second.interleaved.rounds >= 20


def test_a_restarted_server_resumes_a_shared_attempt(breakable: FarmProcess, pair: list[Path]) -> None:
    breakable.start()
    with breakable.client() as farm:
        job = farm.bench(pair, min_time_s=2.0, interleave=True, profile=False)
        measured(job)
        breakable.kill9()
        breakable.restart()
        first, second = farm.job(job.id).result().reports
        assert (first.state, second.state) == ("SUCCEEDED", "SUCCEEDED")
        assert [cell.attempts for cell in farm.job(job.id).info.cells] == [1, 1]
        assert second.interleaved.base_cell == first.cell


def test_cancelling_ends_all_runners_of_an_attempt(breakable: FarmProcess, pair: list[Path]) -> None:
    breakable.start()
    with breakable.client() as farm:
        job = farm.bench(pair, min_time_s=20.0, interleave=True, profile=False)
        measured(job)
        assert job.cancel() is JobState.CANCELLED
        assert wait_until(lambda: not runners(breakable.agents[0].pid), PROMPTLY_S), "a runner lives"
        assert [report.state for report in farm.job(job.id).result().reports] == ["CANCELLED", "CANCELLED"]
        assert wait_until(lambda: farm.devices()[0].state.name == "IDLE")
