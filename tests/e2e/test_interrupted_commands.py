"""Ctrl-C at a command that waits: what it says of its job."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.farm import FarmProcess
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="commands wait for a farm until they are interrupted")


def interrupt(*arguments: str, at: str, cwd: Path) -> str:
    """Interrupt a command as soon as it prints a text, and return what it prints after that."""
    process = subprocess.Popen(
        [sys.executable, "-m", "etfarm.wire.command", *arguments], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert any(at in line for line in process.stderr)
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
