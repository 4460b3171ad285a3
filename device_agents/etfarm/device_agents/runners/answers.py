"""Fields of what a runner answers, read with suspicion: its process runs a user's program, which may write to its pipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = (1 << 63) - 1
_MOST_CHARACTERS: Final = 1 << 16
MOST_DIMS: Final = 64

Event = Mapping[str, Any]


class BadAnswer(ValueError):
    """A field is missing, or of another sort than the protocol's."""


def whole(event: Event, key: str, most: int = _MOST) -> int:
    """Return a whole number from 0 on.

    Raises:
        BadAnswer: it is missing, negative, above `most`, or no whole number.
    """
    return _whole(event.get(key), key, most)


def optional_whole(event: Event, key: str) -> int | None:
    """Return a whole number from 0 on, or None where the runner says null.

    Raises:
        BadAnswer: as `whole`.
    """
    if key not in event:
        raise BadAnswer(f"{key} is missing")
    return None if event[key] is None else whole(event, key)


def wholes(event: Event, key: str, most_items: int = 1 << 16) -> tuple[int, ...]:
    """Return a list of whole numbers from 0 on.

    Raises:
        BadAnswer: it is none, or has more than `most_items`.
    """
    return tuple(_whole(item, key, _MOST) for item in _items(event, key, most_items))


def text(event: Event, key: str, default: str | None = None) -> str:
    """Return a text that any message can carry: without halves of surrogate pairs, and cut after 65,536 characters.

    Raises:
        BadAnswer: it is missing without a `default`, or is no text.
    """
    return _text(event.get(key, default), key)


def texts(event: Event, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return a list of texts, each as `text`.

    Raises:
        BadAnswer: as `text`, or it is no list.
    """
    if key not in event and default is not None:
        return default
    return tuple(_text(item, key) for item in _items(event, key, 1 << 16))


def truth(event: Event, key: str) -> bool:
    """Return a truth.

    Raises:
        BadAnswer: it is missing, or is none.
    """
    if not isinstance(event.get(key), bool):
        raise BadAnswer(f"{key} is {_shown(event.get(key))}, not true or false")
    return bool(event[key])


def optional_truth(event: Event, key: str) -> bool | None:
    """Return a truth, or None where the runner says null or nothing.

    Raises:
        BadAnswer: as `truth`.
    """
    return None if event.get(key) is None else truth(event, key)


def events(event: Event, key: str) -> list[Event]:
    """Return a list of objects.

    Raises:
        BadAnswer: it is none, or an item is no object.
    """
    items = _items(event, key, 1 << 16)
    for item in items:
        if not isinstance(item, dict):
            raise BadAnswer(f"{key} holds {_shown(item)}, no object")
    return items


def _items(event: Event, key: str, most: int) -> list[Any]:
    value = event.get(key)
    if not isinstance(value, list):
        raise BadAnswer(f"{key} is {_shown(value)}, no list")
    if len(value) > most:
        raise BadAnswer(f"{key} has {len(value)} items, more than {most}")
    return value


def _whole(value: object, key: str, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise BadAnswer(f"{key} is {_shown(value)}, no whole number from 0 to {most}")
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise BadAnswer(f"{key} is {_shown(value)}, no text")
    return value[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return ascii(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
