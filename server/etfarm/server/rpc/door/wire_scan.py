"""Count of the objects that decoding a request would create, before it is decoded: two bytes can become a hundred."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from etfarm.server.rpc.door.limits import limit_of
from etfarm.server.state.varint import read_varint

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5

_NUMBER_BYTES: Final = 10
"""Length of the longest varint, in bytes."""

_FIELDS_PER_ENTRY: Final = 8
"""Maximum number of fields of any kind per allowed entry."""


class TooManyFields(Exception):
    """A message with more entries than allowed."""

    def __init__(self, most: int, got: int) -> None:
        super().__init__(f"{got} entries, {most} allowed")
        self.most = most
        self.got = got


class Scan:
    """A scan of an encoded message's fields, in slices. It descends into messages and skips everything else.

    Bytes that are not a valid message are left to the decoder.
    """

    def __init__(self, data: bytes, descriptor: Descriptor, most_entries: int) -> None:
        self._data = data
        self._most = most_entries
        self._entries = 0
        self._fields = 0
        self._open: list[tuple[int, int, _Known]] = [(0, len(data), _known(descriptor))]
        """Byte ranges that remain to be scanned: start, end, and the fields of their message."""

    def slices(self, steps: int) -> Iterator[None]:
        """Scan all fields, about `steps` of them between two yields.

        Raises:
            TooManyFields: as `run`.
        """
        while not self.run(steps):
            yield

    def run(self, steps: int) -> bool:
        """Scan about `steps` fields; return whether all were scanned.

        Raises:
            TooManyFields: there are more entries than allowed.
        """
        data = self._data
        while self._open:
            at, end, known = self._open.pop()
            while at < end:
                if steps <= 0:
                    self._open.append((at, end, known))
                    self._require_within_limit()
                    return False
                steps -= 1
                self._fields += 1
                tag, at = read_varint(data, at, end)
                kind, number = tag & 7, tag >> 3
                if kind == _VARINT:
                    _, at = read_varint(data, at, end)
                elif kind == _LENGTH:
                    size, at = read_varint(data, at, end)
                    if number in known.entries:
                        self._entries += 1
                        child = known.entries[number]
                        if child is not None and 0 < size <= end - at:
                            self._open.append((at + size, end, known))
                            end, known = at + size, _known(child)
                            continue
                    elif size > known.packed_bytes.get(number, size):
                        raise TooManyFields(known.packed_bytes[number] // _NUMBER_BYTES, size)
                    at += size
                elif kind in (_FIXED64, _FIXED32):
                    at += 8 if kind == _FIXED64 else 4
                else:
                    at = end  # a group, which the contract does not use, or no valid message
        self._require_within_limit()
        return True

    def _require_within_limit(self) -> None:
        if self._entries > self._most or self._fields > _FIELDS_PER_ENTRY * self._most:
            raise TooManyFields(self._most, max(self._entries, self._fields // _FIELDS_PER_ENTRY))


@dataclass(frozen=True)
class _Known:
    """Properties of a message's fields that the scan needs, by field number."""

    entries: dict[int, Descriptor | None]
    """Fields that count as entries: messages, with their type, and lists of texts, with None."""
    packed_bytes: dict[int, int]
    """Lists of numbers, with the maximum size of their packed bytes."""


@cache
def _known(descriptor: Descriptor) -> _Known:
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    lists = [field for field in descriptor.fields if field.is_repeated and field.message_type is None]
    messages = {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
    return _Known(
        messages | {field.number: None for field in lists if field.type in texts},
        {field.number: limit_of(field).most * _NUMBER_BYTES for field in lists if field.type not in texts},
    )


@cache
def can_grow(descriptor: Descriptor) -> bool:
    """Return whether messages of a type may contain an unlimited number of objects."""
    return any(
        field.is_repeated or (field.message_type is not None and can_grow(field.message_type)) for field in descriptor.fields
    )
