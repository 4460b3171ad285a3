"""A server with a full disk: it waits to store results, and starts no run without space for its result."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.wire.errors import EtfarmError
from tests.support import models
from tests.support.farm import FarmProcess, wait_until
from tests.support.watched_jobs import until_phase

pytestmark = pytest.mark.slow(reason="fills disks of farms of its own")

LONG = {"iterations": 100, "min_time_s": 4.0}
MOUNT = 'mkdir -p "$0"; mount -t tmpfs -o size=160m none "$0" && exec "$@"'
"""A small disk that only the server sees, and that is gone with it."""


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm whose server has little space; each test frees what it fills."""
    enter = ["unshare", "--mount", "--propagation", "private"]
    probe = subprocess.run([*enter, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"needs root for a mount of its own: {probe.stderr}")
    folder = tmp_path_factory.mktemp("small_disk")
    data = folder / "server"
    with FarmProcess(folder, within=[*enter, "sh", "-c", MOUNT, str(data)], serve=["--keep-free-mib", "8"]) as farm:
        yield farm.start()


def filler(farm: FarmProcess) -> Path:
    """Return a file on the server's disk."""
    assert farm.server is not None
    return Path(f"/proc/{farm.server.pid}/root{farm.folder}/server/filler")


def fill(farm: FarmProcess) -> None:
    """Fill the disk completely."""
    with pytest.raises(OSError, match="No space left"), filler(farm).open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with pytest.raises(OSError, match="No space left"), filler(farm).open("ab", buffering=0) as file:
        while True:
            file.write(b"x")


def leave(farm: FarmProcess, free_bytes: int) -> None:
    """Fill the disk except for some bytes."""
    assert farm.server is not None
    free = subprocess.run(
        ["nsenter", "-t", str(farm.server.pid), "-m", "df", "--output=avail", "-B1", str(farm.folder / "server")],
        capture_output=True, text=True, check=True,
    ).stdout.split()[-1]  # fmt: skip
    filler(farm).write_bytes(bytes(int(free) - free_bytes))


def test_a_run_that_finishes_on_a_full_disk_succeeds_once_space_is_free(small_disk: FarmProcess, tmp_path: Path) -> None:
    with small_disk.client() as farm:
        job = farm.bench(models.save(models.conv, tmp_path / "conv.pt2"), **LONG)
        until_phase(job, "TIMED")
        fill(small_disk)
        agent = small_disk.agents[0]
        assert wait_until(lambda: "a transfer was cut (RESOURCE_EXHAUSTED)" in agent.log.read_text()), agent.log.read_text()
        filler(small_disk).unlink()
        report = job.result().report
        assert report.state == "SUCCEEDED"
        assert report.latency is not None and len(report.latency.samples_ns) >= 100
        assert farm.job(job.id).info.cells[0].attempts == 1


def test_new_work_is_refused_before_the_journal_lacks_space_and_accepted_again_by_itself(
    small_disk: FarmProcess, tmp_path: Path
) -> None:
    # Four seconds of a shorter program can have more samples than the disk has room for.
    model = models.save(models.resnet8, tmp_path / "resnet8.pt2")
    with small_disk.client() as farm:
        farm.compile(model).wait()
        running = farm.bench(model, **LONG)
        until_phase(running, "TIMED")
        leave(small_disk, 10 << 20)  # below the 12 MiB for new work, and above the 8 MiB for the journal
        with pytest.raises(EtfarmError) as refused:
            farm.bench(model, **LONG)
        assert (refused.value.reason, refused.value.kind.value) == ("DISK_FULL", "RESOURCE_EXHAUSTED")
        info = farm.info()
        assert info.is_disk_full and info.disk_free_bytes is not None and 8 << 20 < info.disk_free_bytes < 12 << 20
        seen = len((small_disk.folder / "serve.log").read_text())
        assert running.result().report.state == "SUCCEEDED", "results of running work fit"
        assert "nothing can be written" not in (small_disk.folder / "serve.log").read_text()[seen:], "and are stored at once"
        filler(small_disk).unlink()
        assert farm.bench(model, iterations=100, min_time_s=0.0).result().report.state == "SUCCEEDED"
        assert not farm.info().is_disk_full


def test_no_run_starts_without_disk_space_for_its_result(small_disk: FarmProcess, tmp_path: Path) -> None:
    model = models.save(models.conv, tmp_path / "conv.pt2")
    with small_disk.client() as farm:
        program = farm.compile(model)
        program.wait()
        leave(small_disk, 14 << 20)  # enough for the journal, and not for a result
        job = farm.bench(model, iterations=100, min_time_s=0.0)
        waiting, _ = until_phase(job, "WAIT_FOR_ROOM")
        assert "the server's disk is full" in waiting.message
        filler(small_disk).unlink()
        assert job.result().report.state == "SUCCEEDED"
