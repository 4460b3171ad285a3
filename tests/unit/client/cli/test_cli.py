"""The command line: exit codes, one clear sentence, and `--json` however a command ends. No farm is started here."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etfarm.client.cli import options
from etfarm.client.cli.app import execute
from etfarm.client.cli.commands import bench, compile, completion, devices, jobs, run
from etfarm.client.cli.commands.report import main as report
from etfarm.client.cli.connection import Project
from etfarm.client.cli.files import write_whole
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.workflows import job as flow
from etfarm.client.errors import EmbeddedFarmFailed, exit_code
from etfarm.client.export import spec
from etfarm.client.transport.connection import CHOSEN_PROJECT
from etfarm.wire.errors import EtfarmError, Fault, Kind, error_of
from tests.support.golden import Golden
from tests.support.refusals import refuses

UNREACHABLE = "127.0.0.1:1"
INT8 = "xnnpack_pt2e_int8_static_per_channel"
FOUR_BIT = "xnnpack_torchao_int8da_int4w_per_channel"
STATIC = ("demo:resnet8", "--recipe", INT8)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (error_of(Fault.FARM, "SERVER_UNREACHABLE", "No."), 4),
        (EmbeddedFarmFailed("No."), 4),
        (error_of(Fault.USER, "UNKNOWN_RECIPE", "No."), 2),
        (error_of(Fault.USER, "NO_SUCH_DEVICE", "No.", kind=Kind.FAILED_PRECONDITION), 2),
        (error_of(Fault.USER, "NOT_A_PT2", "No."), 2),
        (error_of(Fault.USER, "TRAINING_MODE", "No.", stage="TORCH_EXPORT"), 1),
        (error_of(Fault.USER, "FACTORY_FAILED", "No."), 1),
        (error_of(Fault.USER, "PROGRAM_CRASHED", "No.", stage="TIMED"), 1),
        (error_of(Fault.DEVICE, "DEVICE_FAILED", "No."), 1),
        (error_of(Fault.FARM, "INTERNAL", "No."), 1),
    ],
)
def test_each_error_has_its_exit_code(error: EtfarmError, code: int) -> None:
    assert exit_code(error) == code


def _argument_id(value: Any) -> str:
    """Return a command's module, or its arguments as they are typed."""
    return " ".join(value) if isinstance(value, list) else value.__module__.rpartition(".")[2]


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        (bench.main, ["demo:resnet9"]),
        (bench.main, ["nothere.pt2"]),
        (bench.main, ["demo:resnet8", "--recipe", "xnnpack_fp31"]),
        (bench.main, ["demo:resnet8", "--device", "arhc=aarch64"]),
        (bench.main, ["demo:resnet8", "--threads", "1,two"]),
        (bench.main, ["demo:resnet8", "--label", "team"]),
        (bench.main, ["demo:resnet8", "--label", "a=b", "--label", "a=c"]),
        (bench.main, ["demo:resnet8", "--cores", "medium"]),
        (bench.main, ["demo:resnet8", "--cores", "3-1"]),
        (devices.main, ["reserve", "", "--for", "soon"]),
        (devices.main, ["list", "--watch", "--json", "-"]),
        (devices.main, ["telemetry", "pi", "--since", "yesterday"]),
        (jobs.main, ["watch"]),
        (jobs.main, ["watch", "latest", "--all"]),
        (jobs.main, ["watch", "a", "b", "--json", "-"]),
        (jobs.main, ["list", "--since", "0d"]),
        (devices.main, ["drain", "--now"]),
        (report.main, ["export", "x.json"]),
        (report.main, ["export", "x.json", "--format", "xml"]),
        (report.main, ["export", "x.json", "--format", "html", "-o", "no/x.html"]),
        (report.main, ["export", "x.json", "--format", "html"]),
        (report.main, ["export", "x.json", "--format", "html", "--what", "samples"]),
        (report.main, ["export", "x.json", "--format", "csv", "--what", "rows"]),
        (report.main, ["export", "x.json", "--format", "executorch"]),
        (report.main, ["export", "latest", "--format", "executorch", "-o", "here.ptd"]),
        (bench.main, ["demo:resnet8", "--inputs", "nothere.npz"]),
        (bench.main, ["demo:resnet8", "--html", "no/x.html"]),
        (bench.main, ["demo:resnet8", "--interleave"]),
        (bench.main, ["demo:resnet8", "--recipe", "portable", "--recipe", INT8, "--interleave", "--repeat", "2"]),
        (bench.main, ["demo:resnet8", "--recipe", "portable", "--recipe", INT8, "--interleave", "--retry-invalid", "1"]),
        (bench.main, ["demo:resnet8", "--detach", "--require-valid"]),
        (bench.main, ["demo:resnet8", "--max-p50", "5"]),
        (bench.main, ["demo:resnet8", "--trace-iterations", "10", "--no-profile"]),
        (bench.main, ["plain.pte", "--numerics"]),
        (bench.main, ["demo:resnet8", "plain.pte", "--min-sqnr", "30"]),
        (bench.main, ["demo:resnet8", "--data", "x.ptd"]),
        (bench.main, ["demo:resnet8", "--data", "here.ptd"]),
        (bench.main, ["demo:resnet8", "--batched"]),
        (bench.main, ["demo:resnet8", "--recipe", INT8, "--calibration", "none"]),
        (bench.main, ["demo:resnet8", "--calibration", "."]),
        (bench.main, ["plain.pt2", "--recipe", FOUR_BIT]),
        (run.main, ["plain.pt2", "--recipe", FOUR_BIT]),
        (compile.main, ["plain.pt2", "--recipe", FOUR_BIT, "-o", "x.pte"]),
        (compile.main, ["demo:resnet8"]),
        (compile.main, ["demo:resnet8", "-o", "no/x.pte"]),
        (compile.main, ["demo:resnet8", "-o", "x.pte", "--stop-after", "QUANTISE"]),
        (compile.main, ["demo:resnet8", "-o", "x.pt2", "--stop-after", "QUANTIZE"]),
        (compile.main, [*STATIC, "-o", "x.pte", "--stop-after", "quantize"]),
        (compile.main, [*STATIC, "-o", "x.csv", "--stop-after", "QUANTIZE"]),
        (compile.main, [*STATIC, "-o", "x.pt2"]),
        (compile.main, [*STATIC, "-o", "x.pt2", "--stop-after", "QUANTIZE", "--etrecord", "x"]),
        (compile.main, [*STATIC, "-o", "plain.pt2/x", "--stop-after", "QUANTIZE"]),
        (compile.main, [*STATIC, "-o", "here.ptd", "--stop-after", "QUANTIZE"]),
        (run.main, ["nothere.pte"]),
        (jobs.main, ["list", "--server", "nowhere"]),
    ],
    ids=_argument_id,
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    golden: Golden, command: Any, argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.ptd").write_bytes(b"")
    (tmp_path / "plain.pte").write_bytes(b"\0\0\0\0ET12")
    with zipfile.ZipFile(tmp_path / "plain.pt2", "w") as archive:
        archive.writestr("plain/models/model.json", "{}")
    assert command(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("etfarm: ") and printed.err.count("\n") == 1
    golden.check(printed.err)


@pytest.mark.parametrize("how", [["--json", "out.json"], ["--json=out.json"]])
@pytest.mark.parametrize("wrong", [["--no-such-option"], ["--iterations", "many"], ["--recipe", "none"]])
def test_json_is_written_for_wrong_usage_too(
    how: list[str], wrong: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench.main(["demo:resnet8", *how, *wrong]) == 2
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["schema"] == "etfarm.report/1"
    assert document["job"] is None and document["reports"] == []
    assert document["error"]["fault"] == "USER"
    assert set(document["error"]) == {"fault", "reason", "message", "remedy", "stage", "metadata"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.remedy("USAGE")
def test_a_date_without_dashes_is_a_date_instead_of_seconds() -> None:
    assert options.instant_of("--since", "20260601") == options.instant_of("--since", "2026-06-01")
    assert options.deadline_of("20260601T1800") == options.deadline_of("2026-06-01T18:00")
    with refuses("USAGE", match="requires a duration, got '30'"):
        options.seconds_of("--max-wait", "30")
    assert options.seconds_of("--max-wait", "30s") == 30


def test_json_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["demo:nothing", "--json", "-"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "UNKNOWN_DEMO"


@pytest.mark.parametrize(("name", "says"), [("no/x.json", "There is no folder"), ("", "is a folder. Name a file.")])
def test_json_that_cannot_be_written_is_reported_before_anything_starts(
    name: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for command in (bench.main, run.main):
        assert command(["demo:resnet8", "--server", UNREACHABLE, "--json", str(tmp_path / name)]) == 2
        printed = capsys.readouterr().err
        assert says in printed and printed.count("\n") == 1


def test_a_server_that_is_not_there_is_exit_code_4(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert jobs.main(["list", "--server", UNREACHABLE, "--server-wait", "0"]) == 4
    assert f"The server at {UNREACHABLE} does not answer" in capsys.readouterr().err


@pytest.mark.remedy("NEEDS_LASTING_FARM")
def test_detach_without_a_lasting_farm_names_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path))
    monkeypatch.delenv("ETFARM_SERVER", raising=False)
    assert bench.main(["demo:resnet8", "--detach"]) == 2
    assert "etfarm up" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # nothing was started
    asyncio.run(flow.require_persistent_farm("farm:7000"))


@pytest.mark.parametrize(
    ("main", "argv"),
    [(compile.main, []), (run.main, []), (jobs.main, ["list"]), (report.main, ["show"]), (devices.main, ["show"])],
)
def test_commands_that_call_a_farm_show_the_option_project(
    main: Callable[[list[str]], int], argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--help"]) == 0
    assert "--project NAME" in capsys.readouterr().out


def test_project_stands_before_or_after_a_subcommand() -> None:
    chosen: list[str | None] = []

    def show(project: Project) -> None:
        chosen.append(CHOSEN_PROJECT.get())

    token = CHOSEN_PROJECT.set(None)
    try:
        for argv in (
            ["--project", "a", "show"],
            ["show", "--project=b"],
            ["--project=a", "show", "--project", "c", "--project", "d"],
        ):
            assert execute({"show": show}, argv, "jobs") == 0
    finally:
        CHOSEN_PROJECT.reset(token)
    assert chosen == ["a", "b", "d"]


def test_a_group_without_a_subcommand_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main([]) == 2
    assert "cancel" in capsys.readouterr().out
    assert jobs.main(["--help"]) == 0


@pytest.fixture
def pte(tmp_path: Path) -> Path:
    path = tmp_path / "x.pte"
    path.write_bytes((4).to_bytes(4, "little") + b"ET12" + bytes(64))
    return path


def test_a_pte_refuses_a_recipe(pte: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(pte), "--recipe", "portable"]) == 2
    assert "already compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tls-ca", "ca.pem"], "--tls-ca requires a server's address"),
        (["--tls-ca", "ca.pem", "--server", UNREACHABLE], "There is no file ca.pem, which --tls-ca names."),
    ],
)
def test_an_authority_without_a_server_or_file_is_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path))
    monkeypatch.delenv("ETFARM_SERVER", raising=False)
    for main, first in ((bench.main, "demo:resnet8"), (jobs.main, "list")):
        assert main([first, *argv]) == 2
        assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_pte_without_inputs_says_that_they_are_made_up(pte: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([str(pte), "--server", UNREACHABLE, "--server-wait", "0"]) == 4
    assert capsys.readouterr().err.splitlines()[0] == "No --inputs: x.pte runs on generated inputs, seed 0."


def test_threads_are_read_from_lists_and_repetitions() -> None:
    assert options.threads_of(["1, 2", "4", "2"]) == [1, 2, 4]
    with refuses("USAGE"):
        options.threads_of(["1,,2"])


def test_duplicates_are_taken_once_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.once("MODEL", ["demo:resnet8", "demo:ds_cnn", "demo:resnet8"], spec.resolve) == ["demo:resnet8", "demo:ds_cnn"]
    assert capsys.readouterr().err == "Duplicates are ignored: MODEL demo:resnet8.\n"
    assert options.once("--threads", [2, 1]) == [2, 1]
    assert capsys.readouterr().err == ""


def test_cores_are_names_or_cpus() -> None:
    assert [options.cores_of(text) for text in ("", "big", "0-3,6", "2")] == ["", "big", "0-3,6", "2"]


def test_labels_may_hold_equals_signs() -> None:
    assert options.labels_of(["a=b=c", "d="]) == {"a": "b=c", "d": ""}


def test_the_document_is_written_with_what_is_known_when_a_command_fails(tmp_path: Path) -> None:
    target = tmp_path / "x.json"

    def command(outcome: Outcome) -> None:
        outcome.json_file = str(target)
        outcome.document = lambda error: {"job": "known", "error": error and error.reason}
        raise error_of(Fault.FARM, "INTERNAL", "Broken.")

    assert execute(command, [], "test") == 1
    assert json.loads(target.read_text()) == {"job": "known", "error": "INTERNAL"}


@pytest.mark.parametrize("verbose", [False, True])
def test_what_lies_behind_an_error_is_shown_where_it_is_asked_for(verbose: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def command(outcome: Outcome) -> None:
        outcome.takes_verbose(verbose)
        try:
            raise ValueError("torch's own words")
        except ValueError as error:
            raise error_of(Fault.USER, "EXPORT_FAILED", "It failed.", stage="TORCH_EXPORT") from error

    assert execute(command, [], "test") == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "etfarm: It failed."
    if verbose:
        assert printed[1].startswith("Traceback") and printed[-1] == "ValueError: torch's own words"
    else:
        assert printed[1:] == ["To see the original error, repeat the command with --verbose."]


def test_a_job_that_failed_names_its_log_once(capsys: pytest.CaptureFixture[str]) -> None:
    def command(outcome: Outcome) -> int:
        outcome.takes_verbose(False)
        outcome.failed_job = "j1"
        return 1

    assert execute(command, [], "test") == 1
    assert capsys.readouterr().err == "To see what the job printed, run `etfarm jobs logs j1`.\n"


@pytest.mark.parametrize(
    ("stages", "lines", "named"),
    [
        (["", "TIMED"], ["I method.cpp:1 No.", "I method.cpp:2 Nor."], True),
        (["LOAD"], [], False),  # `jobs logs` would show nothing
        ([""], ["a compiler's warning"], False),  # refused, as inputs are that do not fit: nothing was at work
        ([None], ["a compiler's warning"], False),
    ],
)
def test_a_log_is_named_where_something_was_at_work_and_said_something(
    stages: list[str | None], lines: list[str], named: bool
) -> None:
    class Job:
        async def logs(self) -> AsyncIterator[str]:
            for line in lines:
                yield line

    class Result:
        reports = tuple(
            SimpleNamespace(error=None if stage is None else error_of(Fault.USER, "X", "No.", stage=stage)) for stage in stages
        )

    job: Any = Job()
    result: Any = Result()
    assert asyncio.run(flow._printed(job, result)) is named


def test_a_defect_of_ours_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "x.json"

    def command(outcome: Outcome) -> None:
        outcome.json_file = str(target)
        raise ZeroDivisionError("oh")

    assert execute(command, [], "test") == 1
    error = json.loads(target.read_text())["error"]
    assert (error["fault"], error["reason"]) == ("FARM", "INTERNAL")
    assert capsys.readouterr().err.splitlines()[-1].startswith("etfarm: `etfarm test` failed with ZeroDivisionError: oh.")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    write_whole(Path(os.devnull), b"gone")


@pytest.mark.parametrize(
    "arguments",
    [
        ["devices", "list", "--help"],
        ["bench", "--help"],
        ["bench", "demo:nothing"],
        ["jobs", "list", "--server", UNREACHABLE, "--server-wait", "0"],
    ],
)
def test_commands_load_no_torch(arguments: list[str]) -> None:
    code = "import sys; from etfarm.wire.command import main; main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "False"


def test_help_loads_no_grpc_and_no_rich() -> None:
    code = (
        "import sys; from etfarm.client.cli.commands.bench import main; main(['--help']); "
        "print({'grpc', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("command", "argv", "sentence"),
    [
        (bench.main, [], "Missing argument"),
        (bench.main, ["demo:resnet8", "--timeout", "0.5"], "--timeout"),
        (bench.main, ["demo:resnet8", "--timeout", "inf"], "--timeout"),
        (run.main, ["demo:resnet8", "--timeout", "nan"], "--timeout"),
        (bench.main, ["demo:resnet8", "--min-time", "inf"], "--min-time"),
        (bench.main, ["demo:resnet8", "--priority", "9999999999"], "--priority"),
        (bench.main, ["demo:resnet8", "--iterations", "0"], "--iterations"),
        (jobs.main, ["shw"], "Did you mean 'show'?"),
        (jobs.main, ["show"], "etfarm: Missing argument 'JOB'. See `etfarm jobs show --help`."),
        (jobs.main, ["list", "--limit", "x"], "See `etfarm jobs list --help`."),
        (jobs.main, ["list", "--json"], "'--json' requires an argument: FILE, or - for stdout. See `etfarm jobs list --help`."),
        (completion.main, [], "Choose from: bash, zsh, fish. See `etfarm completion --help`."),
        (completion.main, ["powershell"], "Invalid value for 'SHELL': 'powershell' is not one of 'bash', 'zsh', 'fish'."),
        (bench.main, ["resnet8"], "'resnet8' does not name a model. Did you mean demo:resnet8? Else give x.pt2, x.pte, "),
        (bench.main, ["demo:resnet8", "--recipe", "int8"], "Did you mean xnnpack_pt2e_int8_dynamic_per_channel, xnnpack_pt2e_"),
        (bench.main, ["demo:resnet8", "--device", "arch:aarch64"], "is not KEY OP VALUE. Give arch=aarch64. Keys: id, "),
        (bench.main, ["demo:resnet8", "--device", "pi:4"], "is not KEY OP VALUE. Keys: id, "),
        (compile.main, ["demo:resnet8", "-o", "r.bin"], "-o writes a .pte, and r.bin has another ending. Name it r.pte."),
    ],
)
def test_a_newcomer_s_mistake_is_answered_in_one_line_with_what_to_type(
    command: Any, argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETFARM_DATA", str(tmp_path / "data"))
    assert command(argv) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("etfarm: ") and printed.err.count("\n") == 1 and printed.out == ""
    assert sentence in printed.err
    assert not (tmp_path / "data").exists(), "nothing was started"


def test_a_named_subcommand_is_built_without_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    built: list[str] = []

    class Other:
        """A subcommand that notes when its parameters are read."""

        __name__ = "other"
        __annotations__ = {}

        def __call__(self) -> None:
            raise AssertionError("not called")

        @property
        def __signature__(self) -> inspect.Signature:
            built.append("other")
            return inspect.Signature()

    def show() -> None:
        print("shown")

    commands = {"show": show, "other": Other()}
    assert execute(commands, ["show"], "things", "Shows things.") == 0
    assert capsys.readouterr().out == "shown\n" and not built
    execute(commands, ["--help"], "things", "Shows things.")
    assert built, "the help of the group has all"


def test_a_command_whose_reader_has_gone_ends_as_sigpipe_ends_it() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "etfarm.wire.command", "completion", "bash"],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
