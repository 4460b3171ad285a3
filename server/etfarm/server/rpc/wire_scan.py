"""What protobuf would make of a request's bytes, counted before it does: two bytes on the wire become an object of a hundred."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5

_FIELDS_PER_ENTRY: Final = 8
"""Fields of any kind that are looked at for each entry that is allowed."""


class TooManyFields(Exception):
    """The message would have more entries than are allowed."""

    def __init__(self, most: int, got: int) -> None:
        super().__init__(f"{got} entries, {most} allowed")
        self.most = most
        self.got = got


class Scan:
    """A walk over a message's fields on the wire that goes down into messages and passes by all else, in slices.

    Bytes that are no message are left to the decoder.
    """

    def __init__(self, data: bytes, descriptor: Descriptor, most_entries: int) -> None:
        self._data = data
        self._most = most_entries
        self._entries = 0
        self._fields = 0
        self._open: list[tuple[int, int, dict[int, Descriptor | None]]] = [(0, len(data), _children(descriptor))]
        """Stretches of the bytes that are left: start, end, and what the fields of their message are."""

    def slices(self, steps: int) -> Iterator[None]:
        """Look at all fields, about `steps` of them between two yields.

        Raises:
            TooManyFields: as `run`.
        """
        while not self.run(steps):
            yield

    def run(self, steps: int) -> bool:
        """Look at about as many fields; return whether all were looked at.

        Raises:
            TooManyFields: there are more entries than are allowed.
        """
        data = self._data
        while self._open:
            at, end, children = self._open.pop()
            while at < end:
                if steps <= 0:
                    self._open.append((at, end, children))
                    self._require_few()
                    return False
                steps -= 1
                self._fields += 1
                tag, at = _varint(data, at, end)
                kind, number = tag & 7, tag >> 3
                if kind == _VARINT:
                    _, at = _varint(data, at, end)
                elif kind == _LENGTH:
                    size, at = _varint(data, at, end)
                    if number in children:
                        self._entries += 1
                        child = children[number]
                        if child is not None and 0 < size <= end - at:
                            self._open.append((at + size, end, children))
                            end, children = at + size, _children(child)
                            continue
                    at += size
                elif kind in (_FIXED64, _FIXED32):
                    at += 8 if kind == _FIXED64 else 4
                else:
                    at = end  # a group, which the contract has none of, or no message at all
        self._require_few()
        return True

    def _require_few(self) -> None:
        if self._entries > self._most or self._fields > _FIELDS_PER_ENTRY * self._most:
            raise TooManyFields(self._most, max(self._entries, self._fields // _FIELDS_PER_ENTRY))


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, end


@cache
def _children(descriptor: Descriptor) -> dict[int, Descriptor | None]:
    """What counts as an entry: messages, by their type, and the texts of lists."""
    return {
        field.number: field.message_type
        for field in descriptor.fields
        if field.message_type is not None or (field.is_repeated and field.type in _TEXTS)
    }


_TEXTS: Final = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


@cache
def can_grow(descriptor: Descriptor) -> bool:
    """Whether messages of a type may hold any number of objects."""
    return any(
        field.is_repeated or (field.message_type is not None and can_grow(field.message_type)) for field in descriptor.fields
    )
