"""The `etfarm` command, which finds a subcommand among the installed entry points and loads only that. Stdlib only."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points, version
from typing import Final, NoReturn

from etfarm.wire.errors import EtfarmError

GROUP = "etfarm.commands"

SUMMARIES = {
    "bench": "measure models on devices: latency, memory, accuracy, operators by source line",
    "compile": "lower a model to a .pte and its ETRecord",
    "run": "run a .pte on a device with your inputs and get its outputs",
    "generate": "generate tokens with a language model on a device, as they come",
    "jobs": "list, show, watch, cancel, retry and delete jobs, read their logs",
    "queue": "show what waits for a device, and for what",
    "devices": "list, watch, reserve, check, label and drain the devices of the farm",
    "agents": "list agents, bind them to tokens, and upgrade them",
    "projects": "list and create projects, change their members and limits",
    "artifacts": "list, get, put, delete and verify the files that the farm stores",
    "recipes": "list and show recipes, and what is missing for those that cannot run here",
    "report": "show a job's reports again",
    "history": "show how the reports of a model went over time, and what changed",
    "compare": "compare two jobs or report files, with a gate for scripts",
    "bundle": "build, add and list the runners that devices are sent",
    "bundle.build": "make a runner for an architecture, from the executorch wheel and a compiler",
    "bundle.add": "give a runner to the farm, for the devices that match it",
    "bundle.list": "show the farm's runners with their architecture, ExecuTorch, backends and size",
    "tokens": "create, list, revoke and rotate the tokens that let people and agents in",
    "tokens.init": "create the first admin's token in a server's own files",
    "audit": "show who changed what, and who was refused",
    "retention": "delete what the retention limits no longer keep, or show what that would be",
    "backup": "copy a server's database and artifacts to a folder, while the server runs",
    "restore": "make a server's data folder from a backup",
    "migrate": "move a stopped farm to PostgreSQL and S3, or back to SQLite and files",
    "webhooks": "add, list, test and remove webhooks, and show what was sent to them",
    "server": "show the server's version, state, settings and metrics",
    "serve": "run the compile server",
    "agent": "serve this machine as a device",
    "doctor": "check what this machine has and lacks, with remedies",
    "up": "keep the embedded farm of this user running",
    "web": "serve the farm's web page",
    "completion": "print a script for the completion of commands and options in bash, zsh or fish",
}
"""The texts of `etfarm --help`, which need not load the commands; a name with a dot is a subcommand."""

_UNWRITTEN: Final = 120
"""Python's exit code where the last output cannot be written."""

_EXTRAS = {"etfarm.server": "server", "etfarm.device_agents": "agent", "etfarm.client": "cli"}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 usage, 3 gate not passed, 4 server unreachable.

    Args:
        argv: its words; those of this process when None, which then ends with the command.
    """
    if argv is not None:
        return _main(argv)
    code = _main(sys.argv[1:])
    if "obstore" in sys.modules:
        _exit(code)
    return code


def _exit(code: int) -> NoReturn:
    """End the process without the destructors of native libraries: obstore's threads may abort it in its last moment."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or _UNWRITTEN
    os._exit(code)


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"etfarm {version('etfarm')}")
        return 0
    if arguments[0] != "serve":
        # Set before a command imports gRPC, which reads the variable on import. Clients report errors themselves; on a server,
        # gRPC's log is the only record of a client's failed handshake.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    return run(arguments, find_commands())


def find_commands() -> dict[str, EntryPoint]:
    """Return all installed commands. It reads files of every installed distribution."""
    return {point.name: point for point in entry_points(group=GROUP)}


def run(arguments: list[str], commands: Mapping[str, EntryPoint]) -> int:
    """Run one of the commands, as `main`."""
    point, rest = _find(commands, arguments)
    if point is None:
        return _unknown(commands, arguments)
    try:
        command = _load(point)
        return command(rest) or 0
    except EtfarmError as error:
        print(f"etfarm: {error}", file=sys.stderr)
        return 4 if error.reason == "SERVER_UNREACHABLE" else 2 if error.kind.value == "INVALID_ARGUMENT" else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has gone; prevent further writes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _find(commands: Mapping[str, EntryPoint], arguments: list[str]) -> tuple[EntryPoint | None, list[str]]:
    if len(arguments) > 1 and (point := commands.get(f"{arguments[0]}.{arguments[1]}")):
        return point, arguments[2:]
    return commands.get(arguments[0]), arguments[1:]


def _load(point: EntryPoint) -> Callable[[list[str]], int | None]:
    try:
        command: Callable[[list[str]], int | None] = point.load()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("etfarm"):
            raise
        extra = next((extra for prefix, extra in _EXTRAS.items() if point.module.startswith(prefix)), "all")
        name = point.name.replace(".", " ")
        print(
            f"etfarm: `{name}` needs etfarm[{extra}] ({error.name} is not installed): pip install 'etfarm[{extra}]'.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    return command


def _unknown(commands: Mapping[str, EntryPoint], arguments: list[str]) -> int:
    inner = sorted(name.partition(".")[2] for name in commands if name.startswith(f"{arguments[0]}."))
    if inner:
        usage = f"usage: etfarm {arguments[0]} {{{','.join(inner)}}} ..."
        if len(arguments) > 1 and arguments[1] in ("-h", "--help"):
            print(f"{usage}\n\n{SUMMARIES[arguments[0]].capitalize()}.\n\n{_rows(inner, f'{arguments[0]}.')}")
            return 0
        print(f"{usage}\nSee `etfarm {arguments[0]} --help`.", file=sys.stderr)
        return 2
    import difflib

    near = difflib.get_close_matches(arguments[0], {name.partition(".")[0] for name in commands}, n=1)
    hint = f" Did you mean `etfarm {near[0]}`?" if near else ""
    print(f"etfarm: there is no command {arguments[0]!r}.{hint} See `etfarm --help`.", file=sys.stderr)
    return 2


def _rows(names: list[str], prefix: str = "") -> str:
    width = max(map(len, names))
    return "\n".join(f"  {name:<{width}}  {SUMMARIES[prefix + name]}" for name in names)


def _help() -> str:
    return (
        "usage: etfarm COMMAND ...\n\nA device farm for ExecuTorch that you host yourself.\n\n"
        f"{_rows([name for name in SUMMARIES if '.' not in name])}\n\n"
        "`etfarm COMMAND --help` shows more. --project NAME (or ETFARM_PROJECT) selects the project of what a command creates.\n"
        "Without --server or ETFARM_SERVER a command uses a farm of its own and leaves nothing running."
    )


if __name__ == "__main__":
    sys.exit(main())
