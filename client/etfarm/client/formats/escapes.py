"""Step 10, client: names and code of others within Markdown and within the HTML that stands in it. Pure functions."""

from __future__ import annotations

import re
from typing import Any, Final

from etfarm.wire.escapes import printable

_SPECIAL: Final = re.compile(r"[\\`*{}\[\]<>#|~@!&$]|(?<!\w)_|_(?!\w)|(?<=www)\.|:(?=//)", re.IGNORECASE)
"""What Markdown reads as more than itself, the bare addresses that GitHub makes links of included."""

_REFERENCES: Final = {"<": "&lt;", "&": "&amp;", "@": "&#64;"}
"""What HTML reads too, so that a backslash would not do."""

_FIRST: Final = re.compile(r"(?:[-+]|\d+[.)])(?=\s|\Z)|[=\-]+(?=\s*\Z)")
"""What makes a list or a heading where a line begins with it."""

_ENDS_CODE: Final = re.compile(r"[`|\\]")
"""Where a span or a cell ends; whether a backslash before it is read differs between Markdown's dialects."""


def text(value: Any) -> str:
    """Return `value` as it is read, in one line: no Markdown, no HTML, no link, no control character."""
    line = in_one_line(value)
    first = _FIRST.match(line)
    if first is not None:
        # A list's mark ends with the character that makes it one.
        end = first.end()
        return f"{line[: end - 1]}\\{line[end - 1]}{_SPECIAL.sub(_escaped, line[end:])}"
    return _SPECIAL.sub(_escaped, line)


def code(value: Any) -> str:
    """Return `value` as code in one line, in a cell of a table too; empty for an empty value."""
    line = in_one_line(value)
    if not line:
        return ""
    return f"<code>{html(line)}</code>" if _ENDS_CODE.search(line) else f"`{line}`"


def html(value: Any) -> str:
    """Return `value` in one line between HTML tags: nothing in it ends them, and it is no Markdown where that is read there."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", in_one_line(value))


def in_one_line(value: Any) -> str:
    """Return `value` without line breaks and control characters; several blanks become one."""
    return printable(" ".join(str(value).split()))


def _escaped(found: re.Match[str]) -> str:
    return _REFERENCES.get(found[0], f"\\{found[0]}")
