"""The error of a wrong command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_WORDS: Final = (
    (r"Input should be a valid integer\b.*", "must be an integer"),
    (r"Input should be a valid number\b.*", "must be a number"),
    (r"Input should be greater than or equal to (\S+)", r"must be at least \1"),
    (r"Input should be less than or equal to (\S+)", r"must be at most \1"),
    (r"Input should be ", "must be "),
)
"""What pydantic, which typer checks values with, says, and what etfarm says."""
_VALUE: Final = re.compile(r"Invalid value for (?P<options>'-[^:]*'): (?P<what>must .*)")


def describe_bad_value(message: str, argv: Sequence[str]) -> str:
    """Return typer's message of a bad value in etfarm's words: `--iterations must be at least 1, got 0`.

    Args:
        message: any message of typer; one that is not about a value of an option stays as it is.
        argv: the command line, which has the value.
    """
    for theirs, ours in _WORDS:
        message = re.sub(theirs, ours, message)
    match = _VALUE.fullmatch(message)
    if match is None:
        return message
    names = match["options"].replace("'", "").split(" / ")
    for place, argument in reversed(list(enumerate(argv))):  # the last one counts
        name, has_value, value = argument.partition("=")
        if name in names and (has_value or place + 1 < len(argv)):
            return f"{names[0]} {match['what'].rstrip('.')}, got {value if has_value else argv[place + 1]}"
    return f"{names[0]} {match['what']}"
