"""Ctrl-C at a command that waits: what it says of its job."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.farm import FarmProcess, etfarm
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="commands wait for a farm until they are interrupted")


def interrupt(*arguments: str, at: str, cwd: Path, before: Callable[[], None] = lambda: None) -> str:
    """Interrupt a command as soon as it prints a text, and return what it prints after that; `before` is called first."""
    process = subprocess.Popen(
        [sys.executable, "-m", "etfarm.wire.command", *arguments], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert any(at in line for line in process.stderr)
    before()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    return errors


def test_an_export_leaves_no_job(farm: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef model():\n    print('begun', flush=True)\n    time.sleep(60)\n")
    with farm.client() as client:
        before = [job.id for job in client.jobs()]
        errors = interrupt("bench", "slow.py:model", "--server", farm.address, at="begun", cwd=tmp_path)
        assert errors == "etfarm: Interrupted; no job runs.\n"
        assert [job.id for job in client.jobs()] == before


def test_a_farm_that_starts_leaves_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("ETFARM_SERVER", raising=False)
    errors = interrupt("bench", str(program("add").path), at="Starting", cwd=tmp_path)
    assert errors == "etfarm: Interrupted; no job runs.\n"


def test_a_watched_job_continues(farm: FarmProcess, tmp_path: Path) -> None:
    with farm.client() as client:
        job = client.bench(program("add").path, min_time_s=30.0)
        errors = interrupt("jobs", "watch", job.id, "--server", farm.address, at="running", cwd=tmp_path)
        assert f"etfarm: Interrupted; job {job.id} continues. `etfarm jobs watch {job.id}` shows it again" in errors
        job.refresh()
        assert not job.state.is_terminal
        job.cancel()


@pytest.mark.remedy("INTERRUPTED")
def test_an_interrupted_job_is_cancelled_and_a_detached_one_continues(farm: FarmProcess, tmp_path: Path) -> None:
    command = ["bench", str(program("add").path), "--min-time", "60", "--server", farm.address]
    errors = interrupt(*command, at="running", cwd=tmp_path)
    with farm.client() as client:
        (ended, *_) = client.jobs()
        assert f"Interrupted; job {ended.id} was cancelled.\n" in errors
        etfarm(*command, "--detach", cwd=tmp_path)
        (left,) = (job for job in client.jobs() if not job.state.is_terminal)
        client.job(left.id).cancel()


def test_a_cancellation_that_no_server_answers_is_not_said_to_have_arrived(farm: FarmProcess, tmp_path: Path) -> None:
    command = ["bench", str(program("add").path), "--min-time", "60", "--server", farm.address]
    assert farm.server is not None
    errors = interrupt(*command, at="running", cwd=tmp_path, before=lambda: farm.server.signal(signal.SIGSTOP))
    farm.server.signal(signal.SIGCONT)
    with farm.client() as client:
        (job,) = (job for job in client.jobs() if not job.state.is_terminal)
        unconfirmed = f"the cancellation of job {job.id} may not have arrived, and the job may go on: no answer from the server"
        assert unconfirmed in errors
        assert f"Run `etfarm jobs cancel {job.id}` when the server answers again." in errors
        client.job(job.id).cancel()
