"""A whole emulated Arm board whose agent dials out to a real farm: a job as on x86, and power that is cut in one's middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch")

from etfarm.client import Farm
from etfarm.client.models import CellState, Device
from tests.support import models
from tests.support.farm import FarmProcess, etfarm, wait_until
from tests.support.two_machines import farm_for_aarch64, measured_on_both
from tests.support.vms import Board, running_board
from tests.support.watched_jobs import until_phase

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="boots a virtual Arm board")]

CACHE = "/var/lib/etfarm/.local/share/etfarm/agent/cache"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm with this machine as its only device."""
    with farm_for_aarch64(tmp_path_factory.mktemp("farm")) as running:
        yield running


@pytest.fixture(scope="module")
def board(place: FarmProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """A running board with a connected agent."""
    with running_board(tmp_path_factory.mktemp("board"), place.address, "--name", "board", "--idle-wait", "0") as board:
        yield board


def the_board(farm: Farm) -> Device:
    """Return the farm's entry of the board."""
    (device,) = (device for device in farm.devices() if device.name == "board")
    return device


def test_a_board_returns_the_outputs_and_lines_of_x86(place: FarmProcess, board: Board, tmp_path: Path) -> None:
    listed = etfarm("devices", "list", "--server", place.address, cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert any({"board", "aarch64", "linux,dummy-virt"} <= set(line.split()) for line in listed.stdout.splitlines()), (
        listed.stdout
    )

    there, _ = measured_on_both(place, tmp_path, "--device", "arch=aarch64", "--device", "emulated=false")
    with place.client() as farm:
        device = the_board(farm)
    assert there["accuracy"][0]["max_abs_error"] < 1e-5

    reported: dict[str, Any] = there["device"]
    assert (reported["id"], reported["name"], reported["arch"], reported["soc"]) == (
        device.id,
        "board",
        "aarch64",
        "linux,dummy-virt",
    )
    assert reported["emulated"] and reported["cores"] == 2 and reported["os"].startswith("Debian GNU/Linux 12")
    assert [cluster.part for cluster in device.clusters] == ["Cortex-A72"]
    assert there["verdict"]["status"] == "NOT_BENCHMARKABLE"
    assert there["runner"]["kind"] == "native" and there["memory"]["peak_rss_bytes"] > 1 << 20
    rss = board.agent_rss_bytes()
    assert rss < 50 << 20, f"the agent has {rss / 1e6:.1f} MB in memory"


def test_a_power_cut_during_a_fetch_leaves_no_trusted_partial_files(place: FarmProcess, board: Board, tmp_path: Path) -> None:
    model = models.save(models.conv, tmp_path / "conv.pt2")
    with place.client() as farm:
        before = the_board(farm)
        # As it was before its first run.
        board.run(f"rm -rf {CACHE}/blobs/* {CACHE}/bundles/*")
        board.limit(500_000)
        job = farm.bench(model, devices="name=board", iterations=3, min_time_s=0.0)
        until_phase(job, "FETCH", "board")
        # What a disk may make of a write that was under way: the length is there, the bytes are not.
        board.run(
            f"cd {CACHE}/blobs; until [ -s *.part ]; do busybox usleep 10000; done;"
            " for part in *.part; do busybox head -c 65536 /dev/zero >> $part || exit 1; done; busybox sync"
        )
        board.power_cut(close_connection=True)
        assert wait_until(lambda: the_board(farm).state.name == "OFFLINE"), "the board is online without power"
        # The board may still run it, for all that the server knows.
        (cell,) = farm.job(job.id).info.cells
        assert (cell.state, cell.attempts) == (CellState.RUNNING, 1), cell
        board.limit(None)
        board.start(wait_for="connected to")
        report = job.result().report
        assert report.state == "SUCCEEDED" and report.accuracy[0].max_abs_error < 1e-5
        assert farm.job(job.id).info.cells[0].attempts == 2
        after = the_board(farm)
        assert (after.id, after.agent_id) == (before.id, before.agent_id)


def test_a_run_repeats_after_its_board_lost_power(place: FarmProcess, board: Board, tmp_path: Path) -> None:
    model = models.save(models.conv, tmp_path / "conv.pt2")
    with place.client() as farm:
        before = the_board(farm)
        # Long enough that the board's shell is done before it.
        job = farm.bench(model, devices="name=board", iterations=100, min_time_s=12.0, profile=False)
        until_phase(job, "TIMED", "board")
        # Files that have their names and not their bytes; the run that is under way keeps the old ones.
        board.run(
            f"cd {CACHE}/blobs && for blob in *; do busybox cp -p $blob ../half && busybox truncate -s 100 ../half"
            " && busybox mv ../half $blob || exit 1; done; busybox sync"
        )
        # Back before the server takes it for dead.
        board.power_cut()
        board.start(wait_for="connected to")
        report = job.result().report
        assert report.state == "SUCCEEDED" and report.measurement.duration_ns > 10e9
        assert report.accuracy[0].max_abs_error < 1e-5
        assert farm.job(job.id).info.cells[0].attempts == 2
        after = the_board(farm)
        assert (after.id, after.agent_id) == (before.id, before.agent_id)
    assert "was damaged on this disk; it is fetched again" in board.console
