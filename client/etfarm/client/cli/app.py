"""The common start and end of every command: arguments, errors and exit codes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import copy_context
from functools import partial

import typer

from etfarm.client.cli.connection import Project
from etfarm.client.cli.help_texts import make_readable
from etfarm.client.cli.options import with_options
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import printable, tell
from etfarm.client.cli.usage import describe_bad_value
from etfarm.client.errors import Interrupted, OutputUnwritable, exit_code
from etfarm.client.transport.daemon_thread import leave_busy_threads
from etfarm.client.transport.server_wait import SAY_AWAY
from etfarm.wire.errors import EtfarmError, FarmError, error_for

Command = Callable[..., int | None]

# typer's usage errors derive from a ClickException that is typer's own or click's, by its version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def execute(command: Command | Mapping[str, Command], argv: list[str], name: str, about: str = "") -> int:
    """Run a command, or a subcommand of a group, and return its exit code; an error is one sentence on stderr.

    Args:
        command: a typer function, or functions by subcommand.
        name: the words after `etfarm`.
        about: the group's help; a function's is its docstring.
    """
    outcome = Outcome()
    code, error = 0, None
    try:
        code = copy_context().run(_run, command, argv, name, about, outcome)
    except EtfarmError as raised:
        error, code = raised, exit_code(raised)
    except (KeyboardInterrupt, typer.Abort):
        error = Interrupted("Interrupted.")
    except _UsageError as raised:
        message = " ".join(str(getattr(raised, "format_message", raised.__str__)()).replace("Value error, ", "").split())
        message = describe_bad_value(message, argv)
        if message.startswith("Option '--json' requires an argument"):
            message = "Option '--json' requires an argument: FILE, or - for stdout."
        # The parser's context names the subcommand, which an option without its argument lacks.
        subcommand = [argv[0]] if argv and isinstance(command, Mapping) and argv[0] in command else []
        words = str(getattr(getattr(raised, "ctx", None), "command_path", "")) or " ".join(["etfarm", name, *subcommand])
        error, code = error_for("USAGE", message if message[-1:] in ".?" else f"{message}.", f"See `{words} --help`."), 2
        outcome.json_file = outcome.json_file or _json_file(argv)
    except SystemExit as left:
        # The parser ends a command whose output nobody reads any more; `etfarm.wire.command` has the exit code of that.
        raise left.__context__ if isinstance(left.__context__, BrokenPipeError) else left from None
    except Exception as bug:  # noqa: BLE001 - the top of a command: scripts get their JSON for our defects too
        sys.stderr.write(printable(traceback.format_exc()))
        what = f"{type(bug).__name__}: {bug}"
        error, code = FarmError(f"`etfarm {name}` failed with {what}.", "This is a defect of etfarm: please report it."), 1
    if isinstance(error, Interrupted):
        code = 128 + error.signal_number
    if error is not None:
        tell(f"etfarm: {error}", to_stderr=True)
    outcome.tell(error)
    try:
        outcome.write(error)
    except OutputUnwritable as raised:
        tell(f"etfarm: {raised}", to_stderr=True)
        code = code or exit_code(raised)
    leave_busy_threads(code)
    return code


def _run(command: Command | Mapping[str, Command], argv: list[str], name: str, about: str, outcome: Outcome) -> int:
    SAY_AWAY.set(partial(tell, to_stderr=True, flush=True))
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    if isinstance(command, Mapping):
        app.callback(help=about)(with_options(_group))
        # Building commands takes most of a group's start, so a named subcommand is built alone.
        named = {argv[0]: command[argv[0]]} if argv and argv[0] in command else command
        for subcommand, function in named.items():
            app.command(subcommand)(with_options(function))
    else:
        app.command()(with_options(command))
    runnable = typer.main.get_command(app)
    make_readable(runnable)
    # A group that is called without a subcommand prints its help, which counts as wrong usage.
    arguments = argv if argv or not isinstance(command, Mapping) else ["--help"]
    code = runnable.main(args=arguments, prog_name=f"etfarm {name}", standalone_mode=False, obj=outcome)
    return int(code or 0) if arguments is argv else 2


def _group(project: Project) -> None:
    """Take the options of a group that come before its subcommand."""


def _json_file(argv: list[str]) -> str | None:
    """Return FILE of `--json` in arguments that could not be parsed."""
    for index, argument in enumerate(argv):
        if argument.startswith("--json="):
            return argument.removeprefix("--json=")
        if argument == "--json" and index + 1 < len(argv):
            return argv[index + 1]
    return None
