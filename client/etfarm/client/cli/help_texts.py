"""Help texts of parameters and errors of a wrong command line in the reader's words: no types of Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_TYPE: Final = re.compile(r" <[^<>]+>(?=\.*$)")
_NOTES: Final = re.compile(r"  \[([^\[\]]*)\]$")
_RANGE: Final = re.compile(r"(?:(-?[\d.]+)<=)?x(?:([<>])=(-?[\d.]+))?")
_LONGEST_SENTENCE: Final = 1000
_BEYOND_USE: Final = 2**31 - 1
"""Bounds from here on exist for the contract's integers, and no reader needs them."""


def make_readable(command: Any) -> None:
    """Change the help of a typer command's parameters, and of its subcommands'."""
    for parameter in command.params:
        # get_help_record is click's interface; how typer composes its texts changes between versions.
        parameter.get_help_record = _Readable(parameter.get_help_record)
    for subcommand in getattr(command, "commands", {}).values():
        subcommand.get_short_help_str = _Whole(subcommand.get_short_help_str)
        make_readable(subcommand)


class _Whole:
    """A `get_short_help_str` that does not cut the sentence at a line's end; the help continues it on further lines."""

    def __init__(self, get_short_help_str: Any) -> None:
        self._get_short_help_str = get_short_help_str

    def __call__(self, limit: int = 0) -> str:
        return str(self._get_short_help_str(_LONGEST_SENTENCE))


class _Readable:
    """A `get_help_record` whose result is made readable."""

    def __init__(self, get_help_record: Any) -> None:
        self._get_help_record = get_help_record

    def __call__(self, context: Any) -> tuple[str, str] | None:
        record: tuple[str, str] | None = self._get_help_record(context)
        return None if record is None else (_TYPE.sub("", record[0]), _NOTES.sub(_with_words, record[1]))


def _with_words(notes: re.Match[str]) -> str:
    """Return the notes behind a help text, such as `[default: 20; x>=1]`, with ranges as words."""
    words = [words_of_range(note) if _RANGE.fullmatch(note) else note for note in notes[1].split("; ")]
    kept = "; ".join(filter(None, words))
    return f"  [{kept}]" if kept else ""


def words_of_range(text: str) -> str:
    """Return `1<=x<=8` as `1 to 8`, `x>=1` as `at least 1` and `x<=8` as `at most 8`, without bounds that only limit memory."""
    match = _RANGE.fullmatch(text)
    assert match is not None, text
    low, high = match[1], match[3] if match[2] == "<" else None
    if match[2] == ">":
        low = match[3]
    low = low if low is not None and abs(float(low)) < _BEYOND_USE else None
    high = high if high is not None and abs(float(high)) < _BEYOND_USE else None
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""


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
