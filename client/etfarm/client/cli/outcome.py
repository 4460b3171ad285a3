"""The outcome of a command: its `--json` and `--html` files, which are written however it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etfarm.client.cli.files import require_writable, write_whole
from etfarm.client.cli.terminal.capabilities import printable, put, tell
from etfarm.wire.errors import EtfarmError, error_for

STDOUT = "-"
"""`--json -` writes to stdout."""


@dataclass
class Outcome:
    """The current outcome of a command; `--json` is written from it, however the command ends."""

    json_file: str | None = None
    """FILE of `--json`, or `-`."""
    html_file: str | None = None
    """FILE of `--html`."""
    junit_file: str | None = None
    """FILE of `--junit`, or `-`."""
    is_measured: bool = False
    """Whether the document has measurements or a comparison, which GitHub Actions shows as annotations and a summary."""
    document: Callable[[EtfarmError | None], dict[str, Any]] | None = None
    """Callback that returns the document etfarm.report/1 as far as known, with the error that ended the command."""
    can_be_verbose: bool = False
    """Whether the command has `--verbose`."""
    verbose: bool = False
    """Whether `--verbose` is set: the original text of an error is shown."""
    failed_job: str = ""
    """The job that the command waited for, if it failed after printing something."""

    @property
    def needs_series(self) -> bool:
        """Whether a file is written that shows samples and times of single iterations."""
        return self.json_file is not None or self.html_file is not None

    def takes_verbose(self, verbose: bool) -> None:
        """Record that the command has `--verbose`, and its value."""
        self.can_be_verbose, self.verbose = True, verbose

    def tell(self, error: EtfarmError | None) -> None:
        """Print on stderr where to read more: the original text of an error, or the log of the failed job."""
        cause = error.__cause__ if error is not None else None
        if cause is not None and self.verbose:
            sys.stderr.write(printable("".join(traceback.format_exception(cause))))
        elif cause is not None and self.can_be_verbose:
            print("To see the original error, repeat the command with --verbose.", file=sys.stderr)
        if self.failed_job and not self.verbose:
            tell(f"To see what the job printed, run `etfarm jobs logs {self.failed_job}`.", to_stderr=True)

    def goes_to(self, file: str | None) -> None:
        """Set FILE of `--json` after checking it, since a job of an hour should not end with an unwritable file.

        Raises:
            USAGE: the folder does not exist, or the file is a folder.
            OutputUnwritable: it cannot be written.
        """
        if file is not None and file != STDOUT:
            require_writable(Path(file))
        self.json_file = file

    def goes_to_html(self, file: str | None) -> None:
        """Set FILE of `--html` after checking it like `goes_to`.

        Raises:
            USAGE, OutputUnwritable: as `goes_to`.
        """
        if file == STDOUT:
            raise error_for("USAGE", "--html cannot write to stdout.", "Name a file.")
        if file is not None:
            require_writable(Path(file))
        self.html_file = file

    def goes_to_junit(self, file: str | None) -> None:
        """Set FILE of `--junit` after checking it like `goes_to`; the command's document has measurements.

        Raises:
            USAGE, OutputUnwritable: as `goes_to`.
        """
        self.is_measured = True
        if file is not None and file != STDOUT:
            require_writable(Path(file))
        if file == STDOUT == self.json_file:
            raise error_for("USAGE", "--json and --junit cannot both be on stdout.", "Give one of them a file.")
        self.junit_file = file

    def write(self, error: EtfarmError | None) -> None:
        """Write `--json`, `--html` and `--junit`, if they are set, and what GitHub Actions shows, if the command runs there.

        Raises:
            OutputUnwritable: a file cannot be written.
        """
        in_actions = self.is_measured and os.environ.get("GITHUB_ACTIONS") == "true"
        if self.json_file is None and self.html_file is None and self.junit_file is None and not in_actions:
            return
        from etfarm.wire import report

        document = self.document(error) if self.document is not None else report.document(None, (), error)
        self._write_json(report.dumps(document))
        if self.html_file is not None:
            from etfarm.client.formats import html

            write_whole(Path(self.html_file), html.write(document))
        if self.junit_file is not None:
            from etfarm.client.formats import junit

            if self.junit_file == STDOUT:
                put(junit.write(document).decode())
            else:
                write_whole(Path(self.junit_file), junit.write(document))
        if in_actions:
            _show_in_actions(document)

    def _write_json(self, text: str) -> None:
        if self.json_file is None:
            return
        if self.json_file == STDOUT:
            put(text)
        else:
            write_whole(Path(self.json_file), text.encode())


def _show_in_actions(document: dict[str, Any]) -> None:
    """Print annotations for GitHub Actions, and append the report to the step's summary.

    The runner reads annotations from both streams; stdout may be a file's.
    """
    from etfarm.client.formats import github

    for line in github.workflow_commands(document, os.environ.get("GITHUB_WORKSPACE", "")):
        print(line, file=sys.stderr)
    if file := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(file).open("ab") as summary:
                summary.write(github.summary(document) + b"\n")
        except OSError as error:
            tell(f"etfarm: The step's summary cannot be written: {error.strerror or error}.", to_stderr=True)
