"""Fields of the forms that change something: how they look, how they are read, and the options of the command that they are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from etfarm.client.web.forms import Fields
from etfarm.wire.errors import error_for

MAX_LINES: Final = 100
MAX_NUMBER: Final = 1e9
_THREADS: Final = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


@dataclass(frozen=True)
class Field:
    """One field of a form. The page's script keeps the shown command true while somebody types."""

    name: str
    label: str
    value: str = ""
    flag: str = ""
    """The option of the command; empty for an argument without one."""
    default: str = ""
    """The value that the command needs not name."""
    unit: str = ""
    """What the command's value ends with, such as `m` for minutes."""
    kind: Literal["text", "number", "checkbox", "lines"] = "text"
    """A text, a number, a box with the value, or a text with several values, one in a line."""
    placeholder: str = ""
    """What holds while it is empty."""
    hint: str = ""
    """A sentence about it."""
    minimum: float | None = None
    maximum: float | None = None
    is_required: bool = False
    is_checked: bool = False

    def arguments(self) -> list[str]:
        """Return the part of the command that the field is."""
        if self.kind == "checkbox":
            values = [self.value] if self.is_checked else []
        elif self.kind == "lines":
            values = lines_of(self.value)
        else:
            values = [f"{self.value}{self.unit}"] if self.value != self.default or (self.is_required and not self.flag) else []
        if self.kind == "checkbox" and not self.value:
            return [self.flag] if self.is_checked else []
        return [part for value in values for part in ((self.flag, value) if self.flag else (value,))]


def command_line(command: Iterable[str], fields: Iterable[Field] = ()) -> str:
    """Return a command with the options of fields, as a shell takes it."""
    return shlex.join([*command, *(argument for field in fields for argument in field.arguments())])


def text_of(fields: Fields, name: str) -> str:
    """Return a field's text without white space around it; empty if there is none."""
    return str(fields.get(name, "")).strip()


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not empty.

    Raises:
        BAD_OPTION: there are too many.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > MAX_LINES:
        raise error_for("BAD_OPTION", f"A field takes at most {MAX_LINES} lines, got {len(lines)}.", "Remove some.")
    return lines


def pairs_of(text: str, label: str) -> dict[str, str]:
    """Return the lines of a text, each `key=value`, as a dict.

    Raises:
        BAD_OPTION: a line is something else.
    """
    pairs = {}
    for line in lines_of(text):
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise error_for(
                "BAD_OPTION",
                f"{label}: each line must be key=value, got {line[:80]!r}.",
                "Write for example rack=3.",
                option=label,
            )
        pairs[key.strip()] = value.strip()
    return pairs


def number_of(fields: Fields, name: str, label: str) -> float | None:
    """Return a field's number; None if it is empty.

    Raises:
        BAD_OPTION: it is not a number, or too large.
    """
    text = text_of(fields, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) <= MAX_NUMBER:
        raise error_for(
            "BAD_OPTION", f"{label} must be a number up to {MAX_NUMBER:g}, got {text[:40]!r}.", "Correct it.", option=label
        )
    return value


def integer_of(fields: Fields, name: str, label: str) -> int | None:
    """Return a field's whole number; None if it is empty.

    Raises:
        BAD_OPTION: it is not a whole number.
    """
    value = number_of(fields, name, label)
    if value is None:
        return None
    if value != int(value):
        raise error_for("BAD_OPTION", f"{label} must be a whole number, got {value:g}.", "Correct it.", option=label)
    return int(value)


def is_thread_count(text: str) -> bool:
    """Return whether a text is a number of threads, 1 to 9999."""
    return _THREADS.fullmatch(text) is not None
