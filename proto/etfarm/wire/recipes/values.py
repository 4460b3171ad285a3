"""The values of arguments and fields: plain types that text, TOML and JSON share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

Plain = str | int | bool | float | tuple[int, ...] | tuple[str, ...]
"""The type of a value. Tuples are lists in JSON and TOML; tuples of ints are written as `1x16` in text."""

_GREATEST = 1 << 63

MAX_ITEMS = 4096
"""Maximum length of a list or tuple."""


@dataclass(frozen=True)
class Argument:
    """One argument of a recipe or component, or one field of a recipe file's table."""

    name: str
    summary: str
    kind: type[str] | type[int] | type[bool] | type[tuple[int, ...]] | type[list[str]]
    """`tuple` is a tuple of ints, `list` a list of texts; a single text is accepted as a list."""
    choices: tuple[Plain, ...] = ()
    """All allowed values, or those of each text of a list; empty if `pattern` or `bounds` define them."""
    pattern: str = ""
    """Regular expression that a str, or each text of a list, must match entirely."""
    like: str = ""
    """Description of `pattern` for users, as part of a sentence; each pattern has one."""
    bounds: tuple[int, int] | None = None
    """Minimum and maximum of an int, or of each int of a tuple."""
    default: Plain | None = None
    required: bool = False
    or_bool: bool = False
    """Whether true and false are also allowed."""

    @property
    def allowed(self) -> str:
        """The allowed values as part of a sentence."""
        return f"true, false, or {self._allowed}" if self.or_bool else self._allowed

    @property
    def _allowed(self) -> str:
        if self.choices:
            values = ", ".join(shown(choice) for choice in self.choices)
            return f"one of, or a list of some of {values}" if self.kind is list else values
        if self.kind is bool:
            return "true, false"
        if self.bounds is not None:
            what = "integers joined by x, each" if self.kind is tuple else "an integer"
            return f"{what} from {self.bounds[0]} to {self.bounds[1]}"
        return self.like

    def convert(self, value: object) -> Plain | None:
        """Return the value converted to this argument's type; None if it is not allowed.

        A str is parsed as on the command line; lists of texts, which have no order, are sorted.
        """
        if self.or_bool and isinstance(value, bool):
            return value
        converted = _converted(self.kind, value)
        return converted if converted is not None and self._allows(converted) else None

    def _allows(self, value: Plain) -> bool:
        if isinstance(value, bool):
            return True
        if self.kind is list:
            return isinstance(value, tuple) and bool(value) and all(self._allows_text(str(text)) for text in value)
        if self.choices:
            return value in self.choices
        if isinstance(value, str):
            return self._allows_text(value)
        numbers = value if isinstance(value, tuple) else (value,)
        low, high = self.bounds or (-_GREATEST, _GREATEST - 1)
        return bool(numbers) and all(isinstance(number, int) and low <= number <= high for number in numbers)

    def _allows_text(self, text: str) -> bool:
        return text in self.choices if self.choices else re.fullmatch(self.pattern, text) is not None


def plain(value: object) -> Plain | None:
    """Return the value of an argument without a specification, from JSON or TOML; None if its type is not supported."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if _encodable(value) else None
    if isinstance(value, int):
        return value if -_GREATEST <= value < _GREATEST else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        if all(isinstance(item, int) and not isinstance(item, bool) and -_GREATEST <= item < _GREATEST for item in value):
            return tuple(value)
        if all(isinstance(item, str) and _encodable(item) for item in value):
            return tuple(value)
    return None


def spoken(text: str) -> Plain:
    """Return the value of a command-line argument without a specification: true, false, a number, or the text."""
    if text in ("true", "false"):
        return text == "true"
    number = integer(text)
    if number is not None:
        return number
    if re.fullmatch(r"-?[0-9]{1,9}\.[0-9]{1,9}", text):
        return float(text)
    return text


def shown(value: object) -> str:
    """Return a value as written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def integer(value: object) -> int | None:
    """Return the int of an int or of its decimal text; None for other values."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,9}", value) else None


def _converted(kind: type[object], value: object) -> Plain | None:
    if kind is bool:
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))
    if kind is int:
        return integer(value)
    if kind is list:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or len(texts) > MAX_ITEMS or not all(isinstance(text, str) for text in texts):
            return None
        return tuple(sorted(set(texts)))
    if kind is tuple:
        parts: Sequence[object] = value.split("x") if isinstance(value, str) else _list(value)
        if len(parts) > MAX_ITEMS:
            return None
        numbers = [integer(part) for part in parts]
        return tuple(n for n in numbers if n is not None) if None not in numbers else None
    return value if isinstance(value, str) else None


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else [value]


def _encodable(text: str) -> bool:
    """Return whether a text can be encoded, which is required for hashing: it has no lone surrogates."""
    return not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)
