"""Output of untrusted text on a terminal: names, code, logs and errors of a farm cannot control it."""

from __future__ import annotations

import sys

from etfarm.wire.escapes import MARK, in_a_line, printable

__all__ = ("MARK", "in_a_line", "printable", "put", "tell")


def tell(text: str, *, to_stderr: bool = False, flush: bool = False) -> None:
    """Print one sentence or line."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout, flush=flush)


def put(text: str) -> None:
    """Write a document to stdout: exactly to a file or a pipe, and printable to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
