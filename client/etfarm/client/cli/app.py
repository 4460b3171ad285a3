"""Steps 1 and 10, command line: how every command starts and ends: arguments, errors, exit codes, Ctrl-C, `--json`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import typer

from etfarm.client.cli.terminal.capabilities import printable, put, tell
from etfarm.client.errors import Interrupted, NotAvailable, OutputUnwritable, exit_code
from etfarm.wire.errors import EtfarmError, FarmError, Fault, UserError, error_of

Answer = TypeVar("Answer")
Command = Callable[..., int | None]

STDOUT = "-"
"""`--json -` writes to stdout."""

# typer's usage errors derive from a ClickException that is typer's own or click's, by its version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


class Usage(UserError):
    """The command line is wrong."""

    reason = "USAGE"


@dataclass
class Outcome:
    """What came of a command so far; `--json` is written from it, however the command ends."""

    json_file: str | None = None
    """FILE of `--json`, or `-`."""
    html_file: str | None = None
    """FILE of `--html`."""
    document: Callable[[EtfarmError | None], dict[str, Any]] | None = None
    """The document etfarm.report/1 as far as it is known, with the error that ended the command."""
    can_be_verbose: bool = False
    """Whether the command has `--verbose`."""
    verbose: bool = False
    """Whether it was given: the original text behind an error is shown."""
    failed_job: str = ""
    """The job that was waited for, where it failed and printed something meanwhile."""

    def takes_verbose(self, verbose: bool) -> None:
        """Tells that the command has `--verbose`, and whether it was given."""
        self.can_be_verbose, self.verbose = True, verbose

    def tell(self, error: EtfarmError | None) -> None:
        """Says on stderr where more is to be read: what lies behind an error, or the log of the job that failed."""
        cause = error.__cause__ if error is not None else None
        if cause is not None and self.verbose:
            sys.stderr.write(printable("".join(traceback.format_exception(cause))))
        elif cause is not None and self.can_be_verbose:
            print("The original error: the same command with --verbose.", file=sys.stderr)
        if self.failed_job and not self.verbose:
            tell(f"What was printed meanwhile: `etfarm jobs logs {self.failed_job}`.", to_stderr=True)

    def goes_to(self, file: str | None) -> None:
        """Takes FILE of `--json`, checked: a job of an hour is not run to be refused its file.

        Raises:
            Usage: there is no such folder, or the file is one.
            OutputUnwritable: it cannot be written.
        """
        if file is not None and file != STDOUT:
            must_be_writable(Path(file))
        self.json_file = file

    def goes_to_html(self, file: str | None) -> None:
        """Takes FILE of `--html`, checked as `goes_to` does.

        Raises:
            Usage, OutputUnwritable: as `goes_to`.
        """
        if file == STDOUT:
            raise Usage("--html writes a file, and - is none.", "Name one.")
        if file is not None:
            must_be_writable(Path(file))
        self.html_file = file

    def write(self, error: EtfarmError | None) -> None:
        """Writes `--json` and `--html`, where they were given.

        Raises:
            OutputUnwritable: a file cannot be written.
        """
        if self.json_file is None and self.html_file is None:
            return
        from etfarm.wire import report

        document = self.document(error) if self.document is not None else report.document(None, (), error)
        self._write_json(report.dumps(document))
        if self.html_file is not None:
            from etfarm.client.formats import html

            write_whole(Path(self.html_file), html.write(document))

    def _write_json(self, text: str) -> None:
        if self.json_file is None:
            return
        if self.json_file == STDOUT:
            put(text)
        else:
            write_whole(Path(self.json_file), text.encode())


def execute(
    command: Command | Mapping[str, Command],
    argv: list[str],
    name: str,
    about: str = "",
    later: Collection[str] = (),
    *,
    takes_project: bool = True,
) -> int:
    """Runs a command, or one of a group's, and answers its exit code; errors are one sentence on stderr.

    Args:
        command: a typer function, or functions by subcommand.
        name: what comes after `etfarm`.
        about: the group's help; a function's is its docstring.
        later: subcommands of a group that this version knows and does not have.
        takes_project: whether `--project NAME` selects the project that owns what the command creates.
    """
    outcome = Outcome()
    code, error = 0, None
    try:
        if argv and argv[0] in later:
            raise NotAvailable(f"`etfarm {name} {argv[0]}`", "")
        code = _run(command, _choose_project(argv) if takes_project else argv, name, about, outcome)
    except EtfarmError as raised:
        error, code = raised, exit_code(raised)
    except (KeyboardInterrupt, typer.Abort):
        error = Interrupted("Interrupted.")
    except _UsageError as raised:
        said = str(getattr(raised, "format_message", raised.__str__)()).strip()
        error, code = Usage(said if said[-1:] in ".?" else f"{said}.", f"See `etfarm {name} --help`."), 2
        outcome.json_file = outcome.json_file or _json_file(argv)
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
    _leave_busy_threads(code)
    return code


def run_async(main: Callable[[], Coroutine[Any, Any, Answer]], outcome: Outcome | None = None) -> Answer:
    """Runs `main` in an event loop. The first Ctrl-C (or SIGTERM) cancels it, so that it can clean up; the second leaves.

    Args:
        outcome: its `--json` file is written at the first Ctrl-C already: after a second one nobody would.

    Raises:
        Interrupted: it was cancelled so and said nothing itself.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(main(), name="command")
    caught: list[int] = []

    def interrupt(number: int) -> None:
        if caught:
            if outcome is not None and outcome.json_file == STDOUT:
                _write_cancelled(outcome)
            sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")
            sys.stderr.flush()
            os._exit(128 + number)
        caught.append(number)
        task.cancel()
        if outcome is not None and outcome.json_file != STDOUT:
            _write_cancelled(outcome)

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, interrupt, number)
    try:
        return loop.run_until_complete(task)
    except (asyncio.CancelledError, Interrupted) as error:
        interrupted = error if isinstance(error, Interrupted) else Interrupted("Interrupted.")
        interrupted.signal_number = caught[0] if caught else signal.SIGINT
        raise interrupted from None
    finally:
        loop.run_until_complete(_end_other_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
        for number in numbers:
            loop.remove_signal_handler(number)
        loop.close()


def _write_cancelled(outcome: Outcome) -> None:
    error = error_of(Fault.USER, "CANCELLED", "Interrupted; the command did not wait until its job was cancelled.")
    try:
        outcome.write(error)
    except OutputUnwritable as unwritable:
        tell(f"etfarm: {unwritable}", to_stderr=True)


async def _end_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_THREAD_NAME = "etfarm work"


async def in_thread(work: Callable[[], Answer]) -> Answer:
    """The answer of blocking work in a thread that nobody has to wait for: Ctrl-C does not wait for torch."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def settle(answer: Answer | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)  # type: ignore[arg-type]

    def target() -> None:
        answer, failed = None, None
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            failed = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, answer, failed)

    threading.Thread(target=target, name=_THREAD_NAME, daemon=True).start()
    return await future


def must_be_writable(path: Path) -> None:
    """For an option that names a file which is written at the end.

    Raises:
        Usage: the file's folder is not there, or the file is a folder.
        OutputUnwritable: this user may not write there.
    """
    if not path.parent.is_dir():
        raise Usage(f"There is no folder {path.parent} for {path}.", "Make it first.", path=path)
    if path.is_dir():
        raise Usage(f"{path} is a folder.", "Name a file.", path=path)
    # A file is replaced, which its folder must allow; a pipe or a device is written to.
    if not os.access(path if path.exists() and not path.is_file() else path.parent, os.W_OK):
        raise OutputUnwritable(f"{path} cannot be written: Permission denied.", "Give another path.", path=path)


def write_whole(path: Path, data: bytes) -> None:
    """Puts `data` at `path` at once: a reader finds all of it or what was there before.

    Raises:
        OutputUnwritable: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or /dev/null: nothing to replace
            return
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputUnwritable(f"{path} cannot be written: {error.strerror or error}.", "Give another path.", path=path) from None


def _run(command: Command | Mapping[str, Command], argv: list[str], name: str, about: str, outcome: Outcome) -> int:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    if isinstance(command, Mapping):
        app.callback(help=about)(_nothing)
        for subcommand, function in command.items():
            app.command(subcommand)(function)
    else:
        app.command()(command)
    runnable = typer.main.get_command(app)
    # A group that is called without a subcommand prints its help, and that is wrong usage.
    asked = argv if argv or not isinstance(command, Mapping) else ["--help"]
    code = runnable.main(args=asked, prog_name=f"etfarm {name}", standalone_mode=False, obj=outcome)
    return int(code or 0) if asked is argv else 2


def _choose_project(argv: list[str]) -> list[str]:
    """Select the project of `--project NAME`, an option of every command that calls a farm, and return the other arguments.

    The last one counts.

    Raises:
        Usage: the name is missing.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    kept: list[str] = []
    chosen: str | None = None
    words = iter(argv[:end])
    for word in words:
        if word == "--project":
            chosen = next(words, "")
        elif word.startswith("--project="):
            chosen = word.removeprefix("--project=")
        else:
            kept.append(word)
    if chosen is not None:
        if not chosen or chosen.startswith("-"):
            raise Usage("--project requires a project's name.", "`etfarm projects list` shows yours.")
        from etfarm.client.transport.connection import CHOSEN_PROJECT

        CHOSEN_PROJECT.set(chosen)
    return kept + argv[end:]


def _nothing() -> None:
    """A group's own callback: its subcommands do everything."""


def _json_file(argv: list[str]) -> str | None:
    """FILE of `--json` in arguments that could not be parsed."""
    for index, argument in enumerate(argv):
        if argument.startswith("--json="):
            return argument.removeprefix("--json=")
        if argument == "--json" and index + 1 < len(argv):
            return argv[index + 1]
    return None


def _leave_busy_threads(code: int) -> None:
    """Ends the process now if work was left behind in a thread: torch at work does not outlive Python's end well."""
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
