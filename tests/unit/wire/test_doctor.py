"""The checks of `etfarm doctor` and their result, apart from what this machine happens to have."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etfarm.wire import doctor
from etfarm.wire.doctor import Finding, Status


def _fail() -> Iterator[Finding]:
    yield Finding("first", Status.OK, "")
    raise OSError("no such disk")


def _succeed() -> Iterator[Finding]:
    yield Finding("one", Status.OK, "fine")
    yield Finding("two", Status.MISSING, "absent", "speed.", "Install it.")


def test_a_check_that_hangs_or_fails_hides_no_other_one() -> None:
    release = threading.Event()

    def hang() -> Iterator[Finding]:
        release.wait(30)
        yield Finding("late", Status.OK, "")

    try:
        findings = doctor.run_checks({"hangs": hang, "fails": _fail, "succeeds": _succeed}, time_limit_s=0.2)
    finally:
        release.set()
    assert [(finding.name, finding.status) for finding in findings] == [
        ("hangs", Status.WARNING), ("fails", Status.WARNING), ("one", Status.OK), ("two", Status.MISSING),
    ]  # fmt: skip
    assert "0.2 s" in findings[0].detail
    assert "no such disk" in findings[1].detail


def test_costs_and_remedies_are_below_their_finding_without_control_characters() -> None:
    finding = Finding("x", Status.WARNING, "a\x1b[31m\nb", "time.", "Buy one.")
    assert list(doctor.format_findings([finding])) == [
        "WARNING   x  a [31m b",
        "             costs: time.",
        "             remedy: Buy one.",
    ]


@pytest.mark.parametrize(("checks", "code"), [({"a": _fail}, 0), ({"a": _succeed}, 1)])
def test_the_exit_code_and_the_json_say_whether_the_main_job_works(
    capsys: pytest.CaptureFixture[str], checks: dict[str, doctor.Check], code: int
) -> None:
    assert doctor.main(["--json"], checks) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["usable"]) == ("etfarm.doctor/1", code == 0)
    assert set(document["findings"][-1]) == {"name", "status", "detail", "cost", "remedy"}


def test_the_json_goes_to_stdout_or_to_a_file_beside_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "-"], {"a": _fail}) == 0
    on_stdout = json.loads(capsys.readouterr().out)
    assert doctor.main(["--json", str(tmp_path / "found.json")], {"a": _fail}) == 0
    assert "The main job works" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text()) == on_stdout


def test_a_file_that_cannot_be_written_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        doctor.main(["--json", str(tmp_path / "no" / "found.json")], {"a": _fail})
    assert end.value.code == 2
    assert "cannot write" in (text := capsys.readouterr().err) and "Give another FILE, or - for stdout." in text


def test_packages_of_one_extra_suffice_for_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking: set[str] = set()

    def find_problem(name: str, rest: str) -> str:
        return f"{name} is not installed" if name in lacking else ""

    monkeypatch.delenv("ETFARM_SERVER", raising=False)
    lacking |= {"typer", "torch"}
    assert Status.MISSING not in {finding.status for finding in doctor.check_packages(find_problem)}, "an agent's machine"
    lacking.remove("typer")
    assert [finding.name for finding in doctor.check_packages(find_problem) if finding.status is Status.MISSING] == ["farm"]
    monkeypatch.setenv("ETFARM_SERVER", "board:1")
    assert Status.MISSING not in {finding.status for finding in doctor.check_packages(find_problem)}, "a client of a server"


def test_another_version_than_the_pinned_one_is_a_problem() -> None:
    assert doctor.find_package_problem("pytest", "==0.0.1 ").startswith("pytest must be 0.0.1, got ")
    assert doctor.find_package_problem("pytest", ">=8") == ""
    assert doctor.find_package_problem("no-such-package", ">=8") == "no-such-package is not installed"


@pytest.mark.parametrize(("absent", "expected"), [("structlog", "phones server"), ("grpc", "phones")])
def test_the_checks_of_a_role_without_its_packages_are_left_out(absent: str, expected: str) -> None:
    script = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from etfarm.wire.doctor import collect_checks\n"
        "names = collect_checks(); assert 'python' in names\n"
        "print(*(name for name in ('phones', 'server', 'compile jail') if name in names))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(expected.split()) <= set(result.stdout.split())
    assert "compile jail" not in result.stdout


def test_a_data_folder_that_is_a_file_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path / "file"))
    assert [finding.status for finding in doctor.check_data_folder()] == [Status.MISSING]
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path / "new" / "folder"))
    assert [finding.status for finding in doctor.check_data_folder()] != [Status.MISSING]
    assert not (tmp_path / "new").exists()
