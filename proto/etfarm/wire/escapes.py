"""Text of others, made harmless for the place that shows it: a terminal, a log line, a spreadsheet's cell.

Names, code, labels, logs and errors come from users, devices and programs. Pure functions, the standard library only.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "\ufffd"
"""What stands for a character that steers: one column, so that widths can be known before."""

_CONTROLS: Final = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
_LINES_ENDS: Final = r"\u2028\u2029"
_BIDI: Final = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LONE_SURROGATES: Final = r"\ud800-\udfff"

_STEERING: Final = re.compile(f"[{_CONTROLS}{_LINES_ENDS}{_BIDI}{_LONE_SURROGATES}]")
"""C0 but for newline and tab, DEL, C1, what turns the direction of writing, and what no encoding has."""

_FORMULA: Final = re.compile(r"'*\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")
"""How a cell begins that a spreadsheet evaluates, quoted or not; U+FF1D and its like are the same signs in full width."""


def printable(text: str) -> str:
    """Return `text` with `MARK` for each character that steers a terminal instead of being seen. Newlines and tabs stay."""
    return _STEERING.sub(MARK, text)


def in_a_line(text: str) -> str:
    """Return `printable` of what has one line of a table or a log: newlines and tabs are marks, too."""
    return printable(text).replace("\n", MARK).replace("\t", MARK)


def spreadsheet_cell(text: str) -> str:
    """Return `text` for a cell of a CSV file: behind an apostrophe where a spreadsheet would evaluate it.

    For text alone: a number that begins with a sign is a number. `spreadsheet_text` gives `text` back.
    """
    return f"'{text}" if _FORMULA.match(text) else text


def spreadsheet_text(cell: str) -> str:
    """Return the text that `spreadsheet_cell` made `cell` of."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
