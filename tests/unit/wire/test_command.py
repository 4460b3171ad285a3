"""The `etfarm` command: it finds subcommands, loads only the one that is called, and its exit codes mean something."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from etfarm.wire import command
from etfarm.wire.errors import DeviceError, EtfarmError, FarmError, Kind, UserError, error_for

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "proto"


def exits(error: EtfarmError | type[BaseException] | int | None) -> EntryPoint:
    """Return an entry point whose command ends so."""
    _endings["now"] = error
    return EntryPoint("bench", f"{__name__}:end", command.GROUP)


_endings: dict[str, EtfarmError | type[BaseException] | int | None] = {}


def end(arguments: list[str]) -> int | None:
    ending = _endings["now"]
    if isinstance(ending, BaseException | type):
        raise ending
    print("arguments", *arguments)
    return ending


def kinded(error: EtfarmError, kind: Kind) -> EtfarmError:
    error.kind = kind
    return error


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "entry_points", lambda group: [exits(_endings.get("now"))])


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (None, 0),
        (0, 0),
        (1, 1),
        (3, 3),
        (UserError("Bad spec."), 2),
        (kinded(UserError("No such job."), Kind.NOT_FOUND), 1),
        (kinded(UserError("Refused."), Kind.FAILED_PRECONDITION), 1),
        (DeviceError("Gone."), 1),
        (FarmError("A bug."), 1),
        (error_for("SERVER_UNREACHABLE", "The server does not answer."), 4),
        (KeyboardInterrupt, 130),
    ],
)
@pytest.mark.usefixtures("only")
def test_the_exit_code_reports_the_outcome(
    ending: EtfarmError | type[BaseException] | int | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _endings["now"] = ending
    assert command.main(["bench", "a", "--b"]) == code
    printed = capsys.readouterr()
    if isinstance(ending, EtfarmError):
        assert printed.err == f"etfarm: {ending}\n"
        assert printed.out == ""
    elif not isinstance(ending, type):
        assert printed.out == "arguments a --b\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bnech", "x"]) == 2
    assert capsys.readouterr().err == "etfarm: there is no command 'bnech'. Did you mean `etfarm bench`? See `etfarm --help`.\n"


def test_a_command_that_is_like_none_points_to_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["qqqq"]) == 2
    assert capsys.readouterr().err == "etfarm: there is no command 'qqqq'. See `etfarm --help`.\n"


def test_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bundle", "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: etfarm bundle {add,build,list}")
    assert all(f"\n  {name:<5}  {command.SUMMARIES[f'bundle.{name}']}" in printed for name in ("add", "build", "list"))
    for arguments in (["bundle"], ["bundle", "nothing"]):
        assert command.main(arguments) == 2
        assert "{add,build,list}" in capsys.readouterr().err


def test_help_without_a_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    assert capsys.readouterr().out.startswith("usage: etfarm COMMAND")


def test_help_has_a_line_for_every_command_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][command.GROUP]
    assert set(points) | {name.partition(".")[0] for name in points} == set(command.SUMMARIES)
    assert project["scripts"]["etfarm"] == "etfarm.wire.command:main"


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_help_needs_the_standard_library_only() -> None:
    code = f"import sys; sys.path.insert(0, {str(PROTO)!r}); from etfarm.wire.command import main; sys.exit(main(['--help']))"
    done = python("-I", "-S", "-c", code)
    assert done.returncode == 0, done.stderr
    for name, summary in command.SUMMARIES.items():
        assert "." in name or any(line.split(maxsplit=1) == [name, summary] for line in done.stdout.splitlines())


BLOCKED = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from etfarm.wire.command import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(
    ("arguments", "blocked", "name", "extra"),
    [
        (["serve", "--help"], "sqlalchemy", "serve", "server"),
        (["agent", "--help"], "psutil", "agent", "agent"),
        (["recipes", "list"], "typer", "recipes", "cli"),
        (["bundle", "list"], "typer", "bundle list", "cli"),
    ],
)
def test_a_missing_extra_is_named_in_one_sentence(arguments: list[str], blocked: str, name: str, extra: str) -> None:
    done = python("-c", BLOCKED.format(blocked=blocked, arguments=arguments))
    assert done.returncode == 2
    assert done.stderr == (
        f"etfarm: `{name}` needs etfarm[{extra}] ({blocked} is not installed): pip install 'etfarm[{extra}]'.\n"
    )


ABORTING = """
import atexit, os, sys, types
class Guard:
    def __del__(self):
        os.abort()
native = sys.modules[{name!r}] = types.ModuleType({name!r})
native.guard = Guard()
atexit.register(print, "at exit")
sys.path.insert(0, {proto!r})
from etfarm.wire.command import main
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "code"), [("obstore", 2), ("another", -signal.SIGABRT)])
def test_a_command_that_used_a_bucket_ends_with_its_code_whatever_its_library_does_last(name: str, code: int) -> None:
    script = ABORTING.format(name=name, proto=str(PROTO))
    done = python("-c", script, "bnech")
    assert "there is no command 'bnech'" in done.stderr
    assert (done.returncode, done.stdout) == (code, "at exit\n")
