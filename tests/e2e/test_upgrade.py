"""Data folders of etfarm 0.1.0 and 0.2.0, recorded when their servers were killed, are converted, and open with this version."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from etfarm.client import Farm
from tests.support.documents import known_part
from tests.support.farm import FarmProcess, etfarm

pytestmark = pytest.mark.slow(reason="converts data folders and runs farms on them")

ROOT: Final = Path(__file__).parents[2]
RECORDED: Final = ROOT / "tests" / "support" / "recorded_folders"
JOBS: Final = ("measured", "again", "interleaved", "compiled", "failed")
"""The jobs of 0.1; the last one failed. There is a live one, too, for which the agent keeps a result."""


def extract(version: str, folder: Path) -> Path:
    """Extract the folder of a version, and return it."""
    with tarfile.open(RECORDED / f"{version}.tar.xz") as archive:
        archive.extractall(folder)
    return folder / version


def convert(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "upgrade" / "convert.py"), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


class Opened:
    """The converted farm of 0.1, served by this version."""

    def __init__(self, folder: Path, farm: FarmProcess, client: Farm) -> None:
        self.folder = folder
        self.farm = farm
        self.client = client
        self.documents: dict[str, Any] = self.read("documents.json")

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder = extract("0.1", tmp_path_factory.mktemp("old"))
    (folder / "agent").rename(folder / "agent-0")
    refused = etfarm("serve", "--data", "server", "--listen", "127.0.0.1:0", cwd=folder)
    assert refused.returncode == 1 and "revision 0005, of an etfarm before 0.3.0" in refused.stderr, refused.stderr
    assert "python docs/upgrade/convert.py FOLDER" in refused.stderr
    for name in ("server", "agent-0"):
        done = convert(folder / name)
        assert done.returncode == 0, done.stderr
    assert convert(folder / "server").stdout.endswith("needs no conversion.\n")
    with FarmProcess(folder, bundle=False) as farm:
        farm.restart()
        with farm.client() as client:
            yield Opened(folder, farm, client)


@pytest.mark.remedy("DATABASE_TOO_OLD")
@pytest.mark.parametrize("name", JOBS)
def test_an_old_job_has_an_equal_document(opened: Opened, name: str) -> None:
    # The farm's server refused the data folder before it was converted: see `opened`.
    before = opened.documents[name]
    after = opened.client.job(before["job"]["id"]).result().json()
    assert known_part(after["reports"], before["reports"]) == before["reports"]
    assert {key: value for key, value in after["job"].items() if key != "server_version"} == {
        key: value for key, value in before["job"].items() if key != "server_version"
    }
    shown = etfarm("report", "show", before["job"]["id"], "--server", opened.farm.address, cwd=opened.folder)
    assert shown.returncode == 0, shown.stderr


def test_the_recorded_reports_have_what_was_moved(opened: Opened) -> None:
    reports = [report for name in JOBS for report in opened.documents[name]["reports"]]
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


def test_a_result_that_an_old_agent_kept_is_delivered(opened: Opened) -> None:
    job = opened.client.job(opened.documents["live"])
    assert not job.state.is_terminal
    opened.farm.add_agent()
    job.wait()
    (report,) = job.result().reports
    assert (report.state, report.error.reason) == ("FAILED", "BOARD_ON_FIRE")
    assert not list((opened.folder / "agent-0" / "results").iterdir())


def test_a_conversion_that_is_killed_can_be_run_again(tmp_path: Path) -> None:
    folder = extract("0.2", tmp_path)
    script = ROOT / "docs" / "upgrade" / "convert.py"
    kill = f"import os, runpy, sys; sys.argv[1:] = [{str(folder / 'server')!r}]; sys.path.insert(0, {str(script.parent)!r})\n"
    kill += "from alembic.operations import Operations\n"
    kill += f"Operations.create_index = lambda *_, **__: os.kill(os.getpid(), {signal.SIGKILL})\n"
    kill += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    assert subprocess.run([sys.executable, "-c", kill], timeout=300, check=False).returncode == -signal.SIGKILL
    done = convert(folder / "server")
    assert done.returncode == 0 and "is converted from revision 0007" in done.stdout, done.stderr


def test_a_farm_of_0_2_keeps_its_reports_and_their_references(tmp_path: Path) -> None:
    folder = extract("0.2", tmp_path)
    document = json.loads((folder / "document.json").read_text())
    done = convert(folder / "server")
    assert done.returncode == 0, done.stderr
    with FarmProcess(folder, bundle=False) as farm:
        farm.restart()
        with farm.client() as client:
            after = client.job("baseline").result().json()
            assert known_part(after["reports"], document["reports"]) == document["reports"]
            (report,) = after["reports"]
            assert report["state"] == "SUCCEEDED" and client.collect(dry_run=True).count == 0
            listed = etfarm("artifacts", "list", "--json", "-", "--server", farm.address, cwd=tmp_path)
            digests = [artifact["digest"] for artifact in json.loads(listed.stdout)["artifacts"]]
            assert digests
            refused = etfarm("artifacts", "delete", "--force", *digests, "--server", farm.address, cwd=tmp_path)
            assert refused.returncode != 0 and "is used by" in refused.stderr
            assert client.delete_job("baseline", force=True) == after["job"]["id"]
