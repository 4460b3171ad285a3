"""The real agent on Debian's Python for aarch64, with what pip installs there and nothing else, through a real farm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("executorch")

from etfarm.wire import tensors
from tests.support.farm import FarmProcess, descendants, etfarm, wait_until
from tests.support.programs import program
from tests.support.qemu_agent import QemuAgent
from tests.support.rootfs import PACKAGES, guest_rss_bytes
from tests.support.two_machines import farm_for_aarch64, measured_on_both
from tests.support.watched_jobs import until_phase

pytestmark = [pytest.mark.boards, pytest.mark.slow(reason="an emulated Arm board runs the agent")]


@pytest.fixture(scope="module")
def farm_with_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """A farm of this machine and a board; `agents[1]` is the board's."""
    folder = tmp_path_factory.mktemp("qemu")
    with farm_for_aarch64(folder) as running:
        agent = QemuAgent(running.address, folder / "board", "--name", "board", "--idle-wait", "0", "--cool-down", "0")
        running.agents.append(agent)
        agent.start()
        agent.expect("connected to")
        yield running


def test_a_job_on_the_board_equals_x86(farm_with_board: FarmProcess, tmp_path: Path) -> None:
    where = ("--device", "arch=aarch64", "--device", "name=board-0")
    board, here = measured_on_both(farm_with_board, tmp_path, *where)
    assert (board["device"]["name"], board["device"]["arch"], board["device"]["emulated"]) == ("board", "aarch64", True)
    assert (
        board["runner"]["kind"] == here["runner"]["kind"] and board["runner"]["bundle_digest"] != here["runner"]["bundle_digest"]
    )
    assert board["verdict"]["status"] == "NOT_BENCHMARKABLE" and len(board["latency"]["samples_ns"]) == 3


def test_a_program_runs_on_the_board_with_inputs_from_a_file(farm_with_board: FarmProcess, tmp_path: Path) -> None:
    created = program("conv")
    np.savez(tmp_path / "in.npz", **{"0": tensors.to_array(created.inputs[0])})
    done = etfarm(
        "run", str(created.path), "--inputs", "in.npz", "-o", "out.npz", "--device", "arch=aarch64",
        "--server", farm_with_board.address, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as outputs:
        (output,) = outputs.values()
    np.testing.assert_allclose(output, tensors.to_array(created.expected[0]), rtol=1e-4, atol=1e-5)


def test_an_idle_agent_uses_little_disk_and_memory(farm_with_board: FarmProcess) -> None:
    with farm_with_board.client() as client:
        assert client.run(program("add").path, device="arch=aarch64").result().report.state == "SUCCEEDED"
    agent = farm_with_board.agents[1]
    assert isinstance(agent, QemuAgent)
    # tests/bench/enrolment.py measures it, 50 MB; this would notice numpy, and all the more torch.
    assert 0 < guest_rss_bytes(agent.pid) < 60e6
    files = [path for folder in (agent.root / PACKAGES, agent.installed) for path in folder.rglob("*") if path.is_file()]
    assert 10e6 < sum(path.stat().st_size for path in files) < 60e6


def test_a_killed_board_leaves_no_process_and_runs_again_later(farm_with_board: FarmProcess) -> None:
    agent = farm_with_board.agents[1]
    with farm_with_board.client() as client:
        (board,) = client.devices("arch=aarch64")
        # /proc/cpuinfo is this machine's, and says nothing about the board's processor.
        assert board.cores == len(os.sched_getaffinity(0)) and not board.features
        job = client.bench(program("conv").path, devices="arch=aarch64", min_time_s=3.0)
        until_phase(job, "TIMED")
        runners = descendants(agent.pid)
        assert len(runners) == 1
        agent.kill9()
        assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in runners))
        agent.start()
        agent.expect("connected to")
        report = job.result().report
        attempts = client.job(job.id).info.cells[0].attempts
    assert (report.state, attempts, report.device.id) == ("SUCCEEDED", 2, board.id)
