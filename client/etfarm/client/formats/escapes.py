"""Escaping of untrusted names and code for Markdown and for HTML within Markdown. These are pure functions."""

from __future__ import annotations

import re
from typing import Any, Final

from etfarm.wire.escapes import printable

_SPECIAL: Final = re.compile(r"[\\`*{}\[\]<>#|~@!&$]|(?<!\w)_|_(?!\w)|(?<=www)\.|:(?=//)", re.IGNORECASE)
"""Characters with a meaning in Markdown, including those of the bare addresses that GitHub turns into links."""

_REFERENCES: Final = {"<": "&lt;", "&": "&amp;", "@": "&#64;"}
"""Characters with a meaning in HTML too, for which a backslash does not suffice."""

_FIRST: Final = re.compile(r"(?:[-+]|\d+[.)])(?=\s|\Z)|[=\-]+(?=\s*\Z)")
"""Beginnings of a line that start a list or a heading."""

_ENDS_CODE: Final = re.compile(r"[`|\\]")
"""Characters that end a code span or a cell; Markdown's dialects differ on whether a backslash escapes them."""


def text(value: Any) -> str:
    """Return `value` escaped in one line, so that it is shown literally: without Markdown, HTML, links or control characters."""
    line = in_one_line(value)
    first = _FIRST.match(line)
    if first is not None:
        # The last character of a list marker is the one to escape.
        end = first.end()
        return f"{line[: end - 1]}\\{line[end - 1]}{_SPECIAL.sub(_escaped, line[end:])}"
    return _SPECIAL.sub(_escaped, line)


def code(value: Any) -> str:
    """Return `value` as code in one line, also valid in a table cell; empty for an empty value."""
    line = in_one_line(value)
    if not line:
        return ""
    return f"<code>{html(line)}</code>" if _ENDS_CODE.search(line) else f"`{line}`"


def html(value: Any) -> str:
    """Return `value` escaped in one line for use between HTML tags, where it is neither HTML nor Markdown."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", in_one_line(value))


def in_one_line(value: Any) -> str:
    """Return `value` without line breaks and control characters, with single spaces."""
    return printable(" ".join(str(value).split()))


def _escaped(match: re.Match[str]) -> str:
    return _REFERENCES.get(match[0], f"\\{match[0]}")
