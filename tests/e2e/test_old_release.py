"""A farm of etfarm 0.1.0: its data folder opens with this version, and its agent gets a sentence that says how to upgrade."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etfarm.client import Farm
from etfarm.wire.names import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from tests.support import old_release
from tests.support.documents import known_part
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
def test_an_old_job_has_an_equal_document(opened: Opened, name: str) -> None:
    before = opened.documents[name]
    after = opened.client.job(before["job"]["id"]).result().json()
    assert known_part(after["reports"], before["reports"]) == before["reports"]
    assert {key: value for key, value in after["job"].items() if key != "server_version"} == {
        key: value for key, value in before["job"].items() if key != "server_version"
    }
    shown = etfarm("report", "show", before["job"]["id"], "--server", opened.farm.address, cwd=opened.folder)
    assert shown.returncode == 0, shown.stderr


def test_old_reports_are_converted(opened: Opened) -> None:
    reports = [report for name in old_release.JOBS for report in opened.documents[name]["reports"]]
    assert any(report["latency"] and len(report["latency"]["samples_ns"]) >= 40 for report in reports)
    assert any(row["times_ns"] for report in reports for row in report["operators"] or ())
    assert any(report["numeric_gap"] for report in reports) and any(report["interleaved"] for report in reports)
    assert {report["state"] for report in reports} == {"SUCCEEDED", "FAILED"}


def test_the_old_history_is_equal(opened: Opened) -> None:
    done = etfarm("history", "ds_cnn", "--json", "after.json", "--server", opened.farm.address, cwd=opened.folder)
    assert done.returncode == 0, done.stderr
    before, after = opened.read("history.json"), opened.read("after.json")
    assert known_part(after, before) == before


def test_a_comparison_of_old_tags_is_equal(opened: Opened) -> None:
    again = opened.documents["again"]["job"]["id"]
    arguments = ("compare", "baseline#0", again, "--json", "compared.json", "--server", opened.farm.address)
    done = etfarm(*arguments, cwd=opened.folder)
    assert done.returncode == 0, done.stderr
    before, after = opened.read("comparison.json"), opened.read("compared.json")
    (after_pair,), (before_pair,) = after["pairs"], before["pairs"]
    # Since 0.2, what one program's separate runs differ by is no difference between programs, and operators have intervals.
    assert after_pair["latency"]["same_program"] and after_pair["latency"]["method"] == before_pair["latency"]["method"]
    for side in ("base", "candidate"):  # with their circumstances since, which commands to measure again repeat
        assert {key: after_pair[side][key] for key in before_pair[side]} == before_pair[side]
    unchanged = [key for key in before_pair if key not in ("latency", "operators", "base", "candidate")]
    for accuracy in after_pair["accuracy"]:  # of one sample then, which no digest tells from others
        for side in ("base", "candidate"):
            assert (accuracy[side].pop("samples"), accuracy[side].pop("samples_digest")) == (1, None)
    assert {key: after_pair[key] for key in unchanged} == {key: before_pair[key] for key in unchanged}
    assert after_pair["latency"]["ratio"] == pytest.approx(before_pair["latency"]["ratio"])
    times = ("p50_ns", "p90_ns", "p99_ns", "load_ns", "load_method_ns", "first_run_ns")
    assert [after_pair["latency"][key] for key in times] == [before_pair["latency"][key] for key in times]


def test_an_old_agent_is_refused_with_upgrade_instructions(opened: Opened, tmp_path: Path) -> None:
    board = old_release.agent(tmp_path, opened.farm.address)
    board.start()
    assert board.process is not None
    assert board.process.wait(timeout=120) != 0
    text = board.log.read_text()
    assert f"this server (etfarm {opened.client.info().version}) speaks {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}" in text
    assert "pip install 'etfarm[agent]==" in text


def test_a_kept_result_of_an_old_agent_is_delivered(opened: Opened) -> None:
    job = opened.client.job(opened.documents["live"])
    assert not job.state.is_terminal
    opened.farm.add_agent()
    job.wait()
    (report,) = job.result().reports
    assert (report.state, report.error.reason) == ("FAILED", "BOARD_ON_FIRE")
    assert not list((opened.folder / "agent-0" / "results").iterdir())


def test_a_client_refuses_a_server_of_0_1(tmp_path: Path) -> None:
    server, address = old_release.start_server(tmp_path)
    try:
        done = etfarm("devices", "list", "--server", address, cwd=tmp_path)
    finally:
        server.stop()
    assert done.returncode == 2 and "is etfarm 0.1.0, which this version cannot talk to. Update the server" in done.stderr


def test_a_job_of_a_client_of_0_1_is_refused_with_the_version_to_install(tmp_path: Path) -> None:
    (tmp_path / "farm").mkdir()
    farm = FarmProcess(tmp_path / "farm", bundle=False)
    try:
        farm.restart()
        old_release.run(
            *("bench", "demo:ds_cnn", "--server", farm.address, "--json", "r.json"), cwd=tmp_path, returncodes=(2,)
        )  # fmt: skip
        with farm.client() as client:
            assert client.jobs() == []
            version = client.info().version
    finally:
        farm.stop()
    error = json.loads((tmp_path / "r.json").read_text())["error"]
    assert error["reason"] == "CLIENT_TOO_OLD" and f"pip install 'etfarm=={version}'" in error["remedy"]
