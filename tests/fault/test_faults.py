"""Crashes of servers, agents and links during a job lose no submitted work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client.models import CellChanged, CellState, JobState
from etfarm.wire.errors import EtfarmError
from tests.support import models
from tests.support.farm import PROMPTLY_S, FarmProcess, descendants, runners, wait_until
from tests.support.proxy import link_to
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="kills servers and agents in the middle of jobs")

LONG = {"iterations": 100, "min_time_s": 4.0, "profile": False}
"""A timed pass that a fault can hit in the middle."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.conv, tmp_path_factory.mktemp("model") / "conv.pt2")


@pytest.fixture(scope="module")
def lasting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm whose server lives through all faults, so that it loads the compiler once; the model is compiled."""
    with FarmProcess(tmp_path_factory.mktemp("lasting"), executes=True) as running:
        running.start()
        with running.client() as farm:
            assert farm.compile(model).wait() is JobState.SUCCEEDED
        yield running


@pytest.fixture
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of the test's own, not yet started, whose server has its children below it."""
    with FarmProcess(tmp_path_factory.mktemp("breakable"), executes=True) as running:
        yield running


def test_a_job_survives_a_server_crash_while_compiling_and_running(breakable: FarmProcess, model: Path) -> None:
    breakable.start()
    with breakable.client() as farm:
        job = farm.bench(model, **LONG)
        _, seen = until_phase(job, "TO_EDGE_TRANSFORM_AND_LOWER")
        assert breakable.server is not None
        children = descendants(breakable.server.pid)
        assert len(children) >= 2  # the forkserver and the compiling child
        breakable.kill9()
        assert wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children)), "children outlived the server"
        breakable.restart()
        _, running = until_phase(job, "TIMED")
        breakable.kill9()
        breakable.restart()
        rest = [event for event in job.watch(after=seen) if event.sequence]
        assert [event.sequence for event in rest] == list(range(seen + 1, rest[-1].sequence + 1))
        assert running >= seen
        report = job.result().report
        assert report.state == "SUCCEEDED"
        assert len(report.latency.samples_ns) >= 100
        # The agent kept the run: the cell was not placed twice.
        starts = [event for event in rest if isinstance(event, CellChanged) and event.cell.state is CellState.RUNNING]
        assert len(starts) == 1


def test_a_job_continues_after_a_broken_link(lasting: FarmProcess, model: Path) -> None:
    with link_to(lasting.address) as link, lasting.client() as farm:
        agent = lasting.add_agent("--name", "linked", server=link.address)
        try:
            job = farm.bench(model, devices="name=linked", **LONG)
            until_phase(job, "TIMED")
            link.cut()
            assert wait_until(lambda: farm.device("linked").state.name == "OFFLINE")
            link.heal()
            assert job.result().report.state == "SUCCEEDED"
            assert farm.job(job.id).info.cells[0].attempts == 1
        finally:
            agent.stop()


def test_cancel_ends_the_compile_child_and_the_runner(lasting: FarmProcess, model: Path, tmp_path: Path) -> None:
    # Its quantization takes long enough to be cancelled in the middle.
    long = models.save(models.resnet8, tmp_path / "resnet8.pt2")
    assert lasting.server is not None
    with lasting.client() as farm:
        idle = descendants(lasting.server.pid)

        compiling = farm.compile(long, "xnnpack_pt2e_int8_static_per_channel", no_cache=True)
        until_phase(compiling, "QUANTIZE")
        assert compiling.cancel() is JobState.CANCELLED
        assert wait_until(lambda: descendants(lasting.server.pid) <= idle, PROMPTLY_S), "the compile child lives"

        running = farm.bench(model, devices="name=board-0", iterations=100, min_time_s=30.0)
        until_phase(running, "TIMED")
        assert runners(lasting.agents[0].pid)
        assert running.cancel() is JobState.CANCELLED
        assert wait_until(lambda: not runners(lasting.agents[0].pid), PROMPTLY_S), "the runner lives"
        with pytest.raises(EtfarmError, match="cancelled"):
            _ = running.result().report
        # The device serves the next run at once.
        again = farm.bench(model, devices="name=board-0", iterations=100, min_time_s=0.0)
        assert again.result().report.state == "SUCCEEDED"


@pytest.mark.remedy("COMPILER_CRASHED")
@pytest.mark.parametrize("stage", ["QUANTIZE", "TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER", "TO_EXECUTORCH"])
def test_a_killed_compile_child_fails_its_job_alone(lasting: FarmProcess, model: Path, stage: str) -> None:
    assert lasting.server is not None
    with lasting.client() as farm:
        idle = descendants(lasting.server.pid)
        dying = farm.compile(model, "xnnpack_pt2e_int8_static_per_channel", no_cache=True)
        until_phase(dying, stage)
        # Its supervisor comes first, and reports how the child ended; the process that tries programs comes last.
        _, child, *_ = sorted(descendants(lasting.server.pid) - idle)
        os.kill(child, signal.SIGKILL)
        assert dying.wait() is JobState.FAILED
        error = farm.job(dying.id).info.cells[0].error
        assert error is not None and (error.reason, error.stage) == ("COMPILER_CRASHED", stage)
        assert wait_until(lambda: descendants(lasting.server.pid) <= idle, PROMPTLY_S), "the compile child lives"
        assert farm.compile(model, "xnnpack_pt2e_int8_static_per_channel").wait() is JobState.SUCCEEDED, "submitted again"
