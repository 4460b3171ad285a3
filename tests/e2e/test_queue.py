"""Jobs that wait, on a real farm: the queue, deadlines and limits of waiting, from the command line and the library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from etfarm.client import Farm
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.programs import program

pytestmark = pytest.mark.slow(reason="a farm's device is drained, and jobs wait for it")


@pytest.fixture
def drained(farm: FarmProcess) -> Iterator[Farm]:
    """A client of a farm whose only device is drained until the test ends."""
    with farm.client() as client:
        (device,) = client.devices()
        client.drain_device(device.id, "new cable")
        try:
            yield client
        finally:
            client.undrain_device(device.id)


def test_what_waits_is_listed_in_order_and_runs_when_the_device_is_back(drained: Farm, farm: FarmProcess, tmp_path: Path) -> None:
    path = program("add").path
    (device,) = drained.devices()
    low = drained.run(path, name="low", max_wait_s=3600)
    high = drained.bench(path, name="high", priority=7, iterations=2, min_time_s=0.0)
    due = drained.run(path, name="due", deadline=timedelta(hours=1))
    assert wait_until(lambda: len(drained.queue().runs) == 3 and all(run.waiting_for for run in drained.queue().runs))
    waiting = drained.queue()
    assert [run.job_id for run in waiting.runs] == [due.id, high.id, low.id], "deadline, priority, then the rest"
    assert [(run.rank, run.exclusive) for run in waiting.runs] == [(1, False), (2, True), (3, False)]
    assert all(f"{device.name} is drained: new cable" in run.waiting_for for run in waiting.runs)
    assert "its deadline" in waiting.runs[0].waiting_for and "at most" in waiting.runs[2].waiting_for
    assert waiting.runs[1].aged_priority >= 7 and waiting.runs[1].expires_at is None and waiting.other_runs == 0
    shown = etfarm("queue", "--server", farm.address, "--json", str(tmp_path / "queue.json"), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "RANK" in shown.stdout and "new cable" in shown.stdout
    document = json.loads((tmp_path / "queue.json").read_text(), parse_constant=pytest.fail)
    assert document["schema"] == "etfarm.queue/1" and document["error"] is None
    assert [run["job_id"] for run in document["queue"]["runs"]] == [due.id, high.id, low.id]
    drained.undrain_device(device.id)
    for job in (low, high, due):
        assert job.result().state == "SUCCEEDED"
    assert etfarm("queue", "--server", farm.address, cwd=tmp_path).stdout == "Nothing waits for a device.\n"


def test_cells_that_wait_too_long_fail_with_the_remedy(drained: Farm, farm: FarmProcess, tmp_path: Path) -> None:
    path = str(program("add").path)
    for options, reason in ((("--max-wait", "1s"), "MAX_WAIT_OVER"), (("--deadline", "2s"), "DEADLINE_PASSED")):
        done = etfarm("run", path, *options, "--json", "r.json", "--server", farm.address, cwd=tmp_path)
        assert done.returncode == 1, done.stdout
        (report,) = json.loads((tmp_path / "r.json").read_text())["reports"]
        assert report["error"]["reason"] == reason and "new cable" in report["error"]["message"]
    assert drained.queue().runs == ()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--deadline", "2020-01-01T00:00"), "must be in the future"),
        (("--deadline", "soon"), "requires a duration or a time"),
        (("--max-wait", "-3s"), "requires a duration"),
        (("--max-wait", "40d"), "at most 2,592,000"),
    ],
)
def test_a_limit_that_cannot_be_is_refused(farm: FarmProcess, tmp_path: Path, options: tuple[str, str], sentence: str) -> None:
    done = etfarm("run", str(program("add").path), *options, "--server", farm.address, cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
