"""The common start and end of every command: arguments, errors and exit codes."""

from __future__ import annotations

import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import is_dataclass
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from etfarm.client.cli.connection import Project
from etfarm.client.cli.help_texts import describe_bad_value, make_readable
from etfarm.client.cli.listing import JsonListing
from etfarm.client.cli.options import ListJson, finite
from etfarm.client.cli.outcome import Outcome
from etfarm.client.cli.terminal.capabilities import printable, tell
from etfarm.client.errors import Interrupted, OutputUnwritable, exit_code
from etfarm.client.transport.daemon_thread import leave_busy_threads
from etfarm.client.transport.server_wait import SAY_AWAY
from etfarm.wire.errors import EtfarmError, FarmError, error_for
from etfarm.wire.options import Option, built, options_of

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


def with_options(command: Command) -> Command:
    """Return the command as typer takes it: with options in place of the parameters that are made of them.

    These have a dataclass of options as their type, or are a `JsonListing`, whose option is `--json`. The options of positional
    ones come last. A parameter of the type `Outcome` gets the command's.
    """
    hints = get_type_hints(command, include_extras=True)
    parts = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type) and kind is not Outcome}
    listings = {name: hint.__metadata__[0] for name, hint in hints.items() if getattr(hint, "__origin__", None) is JsonListing}

    @wraps(command)
    def call(context: typer.Context, **values: Any) -> int | None:
        for name, hint in hints.items():
            if hint is Outcome:
                values[name] = context.obj
        for name, kind in parts.items():
            chosen = {each.name: values.pop(f"{name}_{each.name}") for each in options_of(kind)}
            values[name] = built(kind, Namespace(**chosen))
        for name, key in listings.items():
            values[name] = JsonListing(context.obj, values.pop(f"{name}_json"), key.name, is_list=key.is_list)
        return command(**values)

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    last: list[Parameter] = []
    for each in signature(command).parameters.values():
        if each.name in listings:
            last.append(Parameter(f"{each.name}_json", Parameter.KEYWORD_ONLY, default=None, annotation=ListJson))
        elif each.name in parts:
            own = [_parameter_of(each.name, option) for option in options_of(parts[each.name])]
            (parameters if each.kind is Parameter.KEYWORD_ONLY else last).extend(own)
        elif hints[each.name] is not Outcome:
            parameters.append(each.replace(annotation=hints[each.name]))
    call.__annotations__ = {each.name: each.annotation for each in (*parameters, *last)}
    call.__signature__ = Signature([*parameters, *last])  # type: ignore[attr-defined]
    return call


def _parameter_of(owner: str, option: Option) -> Parameter:
    """Return the parameter of a command that takes an option of the parameter `owner`."""
    value: Any = bool if option.default is False else option.read or str
    value = value if option.default is not None else value | None
    limits = {} if option.range is None else option.range._asdict()
    declared = typer.Option(
        option.flag,
        metavar=option.metavar,
        help=f"{option.help} [{option.without}]" if option.without else str(option.help),
        callback=finite if option.read is float else None,
        **limits,
    )
    name = f"{owner}_{option.name}"
    return Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=Annotated[value, declared])
