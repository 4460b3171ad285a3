"""Step 10, command line: text of others on a terminal: names, code, logs and errors of a farm cannot steer it."""

from __future__ import annotations

import re
import sys
from typing import Final

MARK: Final = "\ufffd"
"""What stands for a character that steers: one column, so that widths can be told before."""

_CONTROLS: Final = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
_LINES_ENDS: Final = r"\u2028\u2029"
_BIDI: Final = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LONE_SURROGATES: Final = r"\ud800-\udfff"

_STEERING: Final = re.compile(f"[{_CONTROLS}{_LINES_ENDS}{_BIDI}{_LONE_SURROGATES}]")
"""C0 but for newline and tab, DEL, C1, what turns the direction of writing, and what no encoding has."""


def printable(text: str) -> str:
    """`text` with a mark for each character that steers a terminal instead of being seen. Newlines and tabs stay."""
    return _STEERING.sub(MARK, text)


def in_a_line(text: str) -> str:
    """`printable`, of what has one line of a table: newlines and tabs are marks, too."""
    return printable(text).replace("\n", MARK).replace("\t", MARK)


def tell(text: str, *, to_stderr: bool = False, flush: bool = False) -> None:
    """Prints one sentence or line."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout, flush=flush)


def put(text: str) -> None:
    """Writes a document to stdout: exactly to a file or a pipe, and printable to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
