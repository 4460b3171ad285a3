"""Shortening of stored messages that are too large to list, so that no single row makes a list unreadable.

New messages have passed the limits of requests. Rows that are older than the limits, and texts that compilers wrote, have not.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

ENTRIES: Final = 1_000
"""Default number of entries to which a list or map is cut."""

_ELLIPSIS: Final = "…"


def shorten(text: str, most: int) -> str:
    """Return the text, cut to at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + _ELLIPSIS


def cut(message: Message, characters: int, entries: int = ENTRIES) -> None:
    """Cut every text of a message to `characters` characters, and every list and map to `entries` entries, recursively."""
    for field, value in message.ListFields():
        if is_map(field):
            _cut_map(value, characters, entries)
        elif field.is_repeated:
            del value[entries:]
            if field.message_type is not None:
                for below in value:
                    cut(below, characters, entries)
            elif field.type == FieldDescriptor.TYPE_STRING:
                value[:] = [shorten(text, characters) for text in value]
        elif field.message_type is not None:
            cut(value, characters, entries)
        elif field.type == FieldDescriptor.TYPE_STRING and len(value) > characters:
            setattr(message, field.name, shorten(value, characters))


def _cut_map(value: Any, characters: int, entries: int) -> None:
    for index, key in enumerate(list(value)):
        if index >= entries or (isinstance(key, str) and len(key) > characters):
            del value[key]
        elif isinstance(value[key], Message):
            cut(value[key], characters, entries)
        elif isinstance(value[key], str):
            value[key] = shorten(value[key], characters)


def fit(message: Message, most_bytes: int) -> None:
    """Cut a message step by step until it has at most `most_bytes` bytes, if possible."""
    characters, entries = 64 << 10, 10_000
    while message.ByteSize() > most_bytes and characters > 64:
        characters, entries = characters // 4, entries // 4
        cut(message, characters, entries)


def is_map(field: FieldDescriptor) -> bool:
    """Return whether a field of a message is a map."""
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)
