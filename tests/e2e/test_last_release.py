"""etfarm 0.2.0 with today's farm: its agent and its client work with today's server, and today's agent with its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.client import Farm
from etfarm.client.models import DeviceState
from tests.support import last_release
from tests.support.farm import Daemon, FarmProcess, etfarm
from tests.support.programs import program
from tests.support.runner import runner_archive

pytestmark = [
    pytest.mark.slow(reason="runs agent, client and server of etfarm 0.2.0"),
    pytest.mark.skipif(not last_release.is_available(), reason="needs the history of the repository: git fetch --unshallow"),
]

QUICK = ("--iterations", "20", "--warmup", "2", "--min-time", "0.01", "--threads", "1")


@pytest.fixture(scope="module")
def old_board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarmProcess]:
    """Today's server with an agent of 0.2.0."""
    farm = FarmProcess(tmp_path_factory.mktemp("new"))
    board = last_release.agent(farm.folder, "")
    try:
        farm.start(agents=0)
        board = last_release.agent(farm.folder, farm.address)
        board.start()
        board.expect("connected to")
        yield farm
    finally:
        board.stop()
        farm.stop()


def test_an_agent_of_the_last_release_runs_todays_jobs(old_board: FarmProcess) -> None:
    with old_board.client() as client:
        (agent,) = client.agents()
        assert (agent.version, agent.allows_upgrade) == (last_release.VERSION, False)
        result = client.bench(program("add").path, threads=[1], iterations=20, warmup=2, min_time_s=0.01).result()
        assert result.report.latency is not None and len(result.report.latency.samples_ns) >= 20
        (device,) = client.devices()
        assert device.state is DeviceState.IDLE


def test_a_client_of_the_last_release_uses_todays_server(old_board: FarmProcess, tmp_path: Path) -> None:
    done = last_release.run(
        "bench", str(program("add").path), *QUICK, "--json", "r.json", "--server", old_board.address, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with Farm(old_board.address) as client:
        assert client.job("latest").result().report.latency is not None


def test_an_agent_that_takes_no_upgrades_is_named(old_board: FarmProcess, tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"")
    done = etfarm(
        *("agents", "upgrade", "--all", "--yes", "--wheel", "x.whl", "--server", old_board.address), cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 1 and "was started without --allow-upgrade; it is left out" in done.stderr
    assert f"Versions now: 1 x etfarm {last_release.VERSION}." in done.stdout


def test_todays_agent_works_with_a_server_of_the_last_release(tmp_path: Path) -> None:
    server = last_release.server(tmp_path)
    board: Daemon | None = None
    try:
        server.start()
        address = server.expect("listening on").rpartition(" ")[2]
        farm = FarmProcess(tmp_path, bundle=False)
        farm.address = address
        with Farm(address) as client:
            assert client.info().protocol_version == 2
            client.add_bundle(runner_archive())
        board = farm.add_agent()
        done = etfarm("bench", str(program("add").path), *QUICK, "--server", address, cwd=tmp_path, environment={})
        assert done.returncode == 0, done.stderr
        # What that server would ignore is refused.
        notify = ("--notify", "https://example.com/", "--server", address)
        notified = etfarm("bench", str(program("add").path), *notify, cwd=tmp_path, environment={})
        assert notified.returncode == 2 and "--notify" in notified.stderr and "Update the server" in notified.stderr
    finally:
        if board is not None:
            board.stop()
        server.stop()
