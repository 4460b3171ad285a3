"""`report export`: where files go, to a file, into a folder or into one that is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from etfarm.client.cli.commands.report import main as command
from etfarm.client.formats import tables
from etfarm.wire import report as wire
from tests.support.documents import document, report

BOTH = tables.WHAT[:2]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A report file in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("kept.json").write_text(wire.dumps(document(report())))
    return "kept.json"


def export(file: str, format_: str, output: str) -> int:
    return command.main(["export", file, "--format", format_, "-o", output])


@pytest.mark.parametrize("format_", ["csv", "parquet"])
@pytest.mark.parametrize("there", [True, False])
def test_a_path_that_ends_with_a_slash_is_a_folder_and_has_both_tables(file: str, format_: str, there: bool) -> None:
    if there:
        Path("both").mkdir()
    assert export(file, format_, "both/") == 0
    assert sorted(path.name.split(".")[1:] for path in Path("both").iterdir()) == [[what, format_] for what in sorted(BOTH)]


def test_a_page_goes_into_a_folder_under_its_own_name(file: str) -> None:
    assert export(file, "html", "pages/") == 0
    (page,) = Path("pages").iterdir()
    assert page.suffix == ".html" and page.read_bytes().startswith(b"<!doctype html>")


def test_a_path_without_a_slash_is_a_file_unless_a_folder_is_there(file: str) -> None:
    assert export(file, "csv", "one") == 0
    assert Path("one").is_file()
    Path("many").mkdir()
    assert export(file, "csv", "many") == 0
    assert len(list(Path("many").iterdir())) == len(BOTH)


@pytest.mark.parametrize(
    ("output", "says"),
    [("kept.json/", "kept.json is not a folder."), ("nowhere/both/", "There is no folder nowhere for nowhere/both.")],
)
def test_a_folder_that_cannot_be_made_is_refused(file: str, output: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(file, "csv", output) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["kept.json"]
