"""Escaping of untrusted text for the place that shows it: a terminal, a log line, a spreadsheet cell.

Names, code, labels, logs and errors come from users, devices and programs. Pure functions, the standard library only.
"""

from __future__ import annotations

import re
from typing import Final

MARK: Final = "\ufffd"
"""The replacement of a control character; one column wide, so that widths can be computed in advance."""

_CONTROLS: Final = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
_LINES_ENDS: Final = r"\u2028\u2029"
_BIDI: Final = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_LONE_SURROGATES: Final = r"\ud800-\udfff"

_STEERING: Final = re.compile(f"[{_CONTROLS}{_LINES_ENDS}{_BIDI}{_LONE_SURROGATES}]")
"""Control characters: C0 except newline and tab, DEL, C1, line separators, changes of the writing direction, and lone
surrogates."""

_FORMULA: Final = re.compile(r"'*\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|'*[\t\r\n]")
"""The beginning of a cell that a spreadsheet evaluates, quoted or not; U+FF1D and similar are full-width signs."""


def printable(text: str) -> str:
    """Return `text` with `MARK` in place of each character that controls a terminal. Newlines and tabs stay."""
    return _STEERING.sub(MARK, text)


def in_a_line(text: str) -> str:
    """Return `text` as `printable` does, for one line of a table or a log: newlines and tabs are replaced, too."""
    return printable(text).replace("\n", MARK).replace("\t", MARK)


def spreadsheet_cell(text: str) -> str:
    """Return `text` for a cell of a CSV file, with an apostrophe in front where a spreadsheet would evaluate it.

    Do not use it for numbers, which may begin with a sign. `spreadsheet_text` reverts it.
    """
    return f"'{text}" if _FORMULA.match(text) else text


def spreadsheet_text(cell: str) -> str:
    """Return the text from which `spreadsheet_cell` computed `cell`."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
