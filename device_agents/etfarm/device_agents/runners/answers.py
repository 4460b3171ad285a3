"""Validated fields of a runner's answers. They are untrusted: the process runs a user's program, which may write to its pipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = (1 << 63) - 1
_MOST_CHARACTERS: Final = 1 << 16
MOST_DIMS: Final = 64

Event = Mapping[str, Any]


class BadAnswer(ValueError):
    """A field that is missing or has another type than the protocol requires."""


def whole(event: Event, key: str, most: int = _MOST) -> int:
    """Return a whole number of 0 or more.

    Raises:
        BadAnswer: the field is missing, negative, above `most`, or not a whole number.
    """
    return _whole(event.get(key), key, most)


def optional_whole(event: Event, key: str) -> int | None:
    """Return a whole number of 0 or more, or None for null.

    Raises:
        BadAnswer: as `whole`.
    """
    if key not in event:
        raise BadAnswer(f"{key} is missing")
    return None if event[key] is None else whole(event, key)


def wholes(event: Event, key: str, most_items: int = 1 << 16) -> tuple[int, ...]:
    """Return a list of whole numbers of 0 or more.

    Raises:
        BadAnswer: the field is not such a list, or has more than `most_items`.
    """
    return tuple(_whole(item, key, _MOST) for item in _items(event, key, most_items))


def text(event: Event, key: str, default: str | None = None) -> str:
    """Return a text that is valid in any protobuf message: without lone surrogates, truncated after 65,536 characters.

    Raises:
        BadAnswer: the field is missing without a `default`, or is not a text.
    """
    return _text(event.get(key, default), key)


def texts(event: Event, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return a list of texts, each as `text` returns it.

    Raises:
        BadAnswer: as `text`, or the field is not a list.
    """
    if key not in event and default is not None:
        return default
    return tuple(_text(item, key) for item in _items(event, key, 1 << 16))


def truth(event: Event, key: str) -> bool:
    """Return a bool.

    Raises:
        BadAnswer: the field is missing or not a bool.
    """
    if not isinstance(event.get(key), bool):
        raise BadAnswer(f"{key} must be true or false, got {_shown(event.get(key))}")
    return bool(event[key])


def optional_truth(event: Event, key: str) -> bool | None:
    """Return a bool, or None if the field is null or missing.

    Raises:
        BadAnswer: as `truth`.
    """
    return None if event.get(key) is None else truth(event, key)


def events(event: Event, key: str) -> list[Event]:
    """Return a list of objects.

    Raises:
        BadAnswer: the field is not a list, or an item is not an object.
    """
    items = _items(event, key, 1 << 16)
    for item in items:
        if not isinstance(item, dict):
            raise BadAnswer(f"{key} must hold objects, got {_shown(item)}")
    return items


def _items(event: Event, key: str, most: int) -> list[Any]:
    value = event.get(key)
    if not isinstance(value, list):
        raise BadAnswer(f"{key} must be a list, got {_shown(value)}")
    if len(value) > most:
        raise BadAnswer(f"{key} must have at most {most} items, got {len(value)}")
    return value


def _whole(value: object, key: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadAnswer(f"{key} must be a whole number from 0 to {most}, got {_shown(value)}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise BadAnswer(f"{key} must be a text, got {_shown(value)}")
    return value[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return ascii(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
