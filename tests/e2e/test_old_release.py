"""A farm of etfarm 0.1.0: its data folder opens with this version, and its agent is told how to upgrade."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etfarm.client import Farm
from etfarm.wire.names import PROTOCOL_VERSION
from tests.support import old_release
from tests.support.farm import FarmProcess, etfarm

pytestmark = [
    pytest.mark.slow(reason="builds etfarm 0.1.0 and runs its farm; opens the data folder with this version's"),
    pytest.mark.skipif(not old_release.is_available(), reason="needs the history of the repository: git fetch --unshallow"),
]


class Opened:
    """A copy of the old farm's data, served by this version."""

    def __init__(self, folder: Path, farm: FarmProcess, client: Farm) -> None:
        self.folder = folder
        self.farm = farm
        self.client = client
        self.documents: dict[str, Any] = json.loads((folder / "documents.json").read_text())

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = tmp_path_factory.mktemp("old") / "farm"
    shutil.copytree(old_release.data_folder(), folder)
    (folder / "agent").rename(folder / "agent-0")
    farm = FarmProcess(folder, bundle=False)
    try:
        farm.restart()
        with farm.client() as client:
            yield Opened(folder, farm, client)
    finally:
        farm.stop()


@pytest.mark.parametrize("name", list(old_release.JOBS))
def test_a_job_has_the_same_document(opened: Opened, name: str) -> None:
    before = opened.documents[name]
    after = opened.client.job(before["job"]["id"]).result().json()
    assert after["reports"] == before["reports"]
    assert {key: value for key, value in after["job"].items() if key != "server_version"} == {
        key: value for key, value in before["job"].items() if key != "server_version"
    }
    shown = etfarm("report", "show", before["job"]["id"], "--server", opened.farm.address, cwd=opened.folder)
    assert shown.returncode == 0, shown.stderr


def test_the_old_reports_have_what_is_converted(opened: Opened) -> None:
    reports = [report for name in old_release.JOBS for report in opened.documents[name]["reports"]]
    assert any(report["latency"] and len(report["latency"]["samples_ns"]) >= 40 for report in reports)
    assert any(row["times_ns"] for report in reports for row in report["operators"] or ())
    assert any(report["numeric_gap"] for report in reports) and any(report["interleaved"] for report in reports)
    assert {report["state"] for report in reports} == {"SUCCEEDED", "FAILED"}


def test_the_history_is_the_same(opened: Opened) -> None:
    done = etfarm("history", "ds_cnn", "--json", "after.json", "--server", opened.farm.address, cwd=opened.folder)
    assert done.returncode == 0, done.stderr
    before, after = opened.read("history.json"), opened.read("after.json")
    assert after == before


def test_a_comparison_by_tag_is_the_same(opened: Opened) -> None:
    again = opened.documents["again"]["job"]["id"]
    arguments = ("compare", "baseline#0", again, "--json", "compared.json", "--server", opened.farm.address)
    done = etfarm(*arguments, cwd=opened.folder)
    assert done.returncode == 0, done.stderr
    before, after = opened.read("comparison.json"), opened.read("compared.json")
    assert after["pairs"] == before["pairs"] and len(after["pairs"]) == 1


def test_an_old_agent_is_told_how_to_upgrade(opened: Opened, tmp_path: Path) -> None:
    board = old_release.agent(tmp_path, opened.farm.address)
    board.start()
    assert board.process is not None
    assert board.process.wait(timeout=120) != 0
    text = board.log.read_text()
    assert f"this server (etfarm {opened.client.info().version}) speaks protocol {PROTOCOL_VERSION}" in text
    assert "pip install 'etfarm[agent]==" in text


def test_a_kept_result_of_an_old_agent_is_delivered(opened: Opened) -> None:
    job = opened.client.job(opened.documents["live"])
    assert not job.state.is_terminal
    opened.farm.add_agent()
    job.wait()
    (report,) = job.result().reports
    assert (report.state, report.error.reason) == ("FAILED", "BOARD_ON_FIRE")
    assert not list((opened.folder / "agent-0" / "results").iterdir())


def test_a_client_says_that_a_server_of_0_1_is_too_old(tmp_path: Path) -> None:
    server, address = old_release.start_server(tmp_path)
    try:
        done = etfarm("devices", "list", "--server", address, cwd=tmp_path)
    finally:
        server.stop()
    assert done.returncode == 2 and "is etfarm 0.1.0, which this version cannot talk to. Update the server" in done.stderr
