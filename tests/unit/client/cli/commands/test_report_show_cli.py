"""`etfarm report show`: which of a job's reports are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etfarm.client.cli.commands.report import main as command
from etfarm.v1 import job_pb2, job_pb2_grpc, report_pb2, report_service_pb2_grpc
from etfarm.wire import report as wire
from tests.support.documents import document, report
from tests.support.fake_servers import ReadyFarm, serving_in_threads


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file of two reports."""
    path = tmp_path / "kept.json"
    path.write_text(wire.dumps(document(report(cell="aaaa", recipe="first"), report(cell="bbbb", recipe="second"))))
    return str(path)


@pytest.mark.parametrize(("names", "recipes"), [([], ["first", "second"]), (["1"], ["second"]), (["aa"], ["first"])])
def test_only_the_chosen_reports_are_shown(
    file: str, names: list[str], recipes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [argument for name in names for argument in ("--report", name)]
    assert command.main(["show", file, *chosen]) == 0
    shown = capsys.readouterr().out
    assert [recipe for recipe in ("first", "second") if f"{recipe} " in shown] == recipes
    assert command.main(["show", file, *chosen, "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [entry["recipe"] for entry in written["reports"]] == recipes


def test_a_report_that_is_not_there_is_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", file, "--report", "2"]) == 2
    assert "There is no report '2'." in capsys.readouterr().err


@pytest.mark.parametrize(("choice", "recipe"), [("1", "second"), ("first", "first")])
def test_a_choice_after_the_file_is_the_one_of_compare(
    file: str, choice: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["show", f"{file}#{choice}", "--json", "-"]) == 0
    assert [entry["recipe"] for entry in json.loads(capsys.readouterr().out)["reports"]] == [recipe]
    assert command.main(["export", f"{file}#{choice}", "--format", "json"]) == 0
    assert [entry["recipe"] for entry in json.loads(capsys.readouterr().out)["reports"]] == [recipe]


def test_a_choice_that_is_not_there_is_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["show", f"{file}#2"]) != 0
    assert "has no report '2'" in " ".join(capsys.readouterr().err.split())


class Reports(ReadyFarm, job_pb2_grpc.JobServiceServicer, report_service_pb2_grpc.ReportServiceServicer):
    """The server's end of a job with one report."""

    def __init__(self, report_: report_pb2.Report) -> None:
        self.report = report_

    def Get(self, request: object, context: object) -> object:
        if isinstance(request, report_pb2.GetReportsRequest):
            return report_pb2.GetReportsResponse(reports=[self.report])
        return job_pb2.Job(id="1f0c2b7e", state=job_pb2.JOB_STATE_SUCCEEDED)


@pytest.mark.parametrize(
    ("id_", "lacking"), [("", "A report of job 1f0c2b7e has no id"), ("r1", "Report r1 of job 1f0c2b7e has no state")]
)
@pytest.mark.parametrize("options", [[], ["--json", "-"]], ids=["shown", "written"])
def test_a_report_that_is_not_whole_is_refused_with_who_finds_out_more(
    id_: str, lacking: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving_in_threads(Reports(report_pb2.Report(id=id_))) as address:
        monkeypatch.setenv("ETFARM_SERVER", address)
        assert command.main(["show", "1f0c2b7e", *options]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert lacking in error and "`etfarm artifacts verify`" in error and "defect of etfarm" not in error
