"""The outcome of a command: its `--json` and `--html` files, which are written however it ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etfarm.client.cli.files import require_writable, write_whole
from etfarm.client.cli.terminal.capabilities import printable, put, tell
from etfarm.client.cli.usage import Usage
from etfarm.wire.errors import EtfarmError

STDOUT = "-"
"""`--json -` writes to stdout."""


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
            require_writable(Path(file))
        self.json_file = file

    def goes_to_html(self, file: str | None) -> None:
        """Takes FILE of `--html`, checked as `goes_to` does.

        Raises:
            Usage, OutputUnwritable: as `goes_to`.
        """
        if file == STDOUT:
            raise Usage("--html writes a file, and - is none.", "Name one.")
        if file is not None:
            require_writable(Path(file))
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
