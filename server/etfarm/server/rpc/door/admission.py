"""Decoding of requests and their check against the limits, before a servicer sees them.

Large requests are checked in slices, between which the event loop serves other calls.

The objects that decoding a request would create are counted before it is decoded: two bytes can become a hundred.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError, Message

from etfarm.server.rpc.door.limits import SIZES, Check, Limit, LimitExceeded, Size, exceeded, limit_of
from etfarm.server.state.varint import read_varint
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.pacing import Pace
from etfarm.wire.errors import error_for

_SMALL_BYTES: Final = 64 << 10
"""Maximum size of requests that are decoded unchecked, since they cannot expand beyond a few MiB."""

_STEPS: Final = 300
"""Number of fields that are checked between two checks of the clock: about 0.3 ms."""

AT_ONCE: Final = 1
"""Number of large requests that are checked at a time: more would only delay other callers."""
_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH: Final = 2
_FIXED32: Final = 5

_NUMBER_BYTES: Final = 10
"""Length of the longest varint, in bytes."""

_FIELDS_PER_ENTRY: Final = 8
"""Maximum number of fields of any kind per allowed entry."""


def deserializer(method: str, decode: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Return a method's request deserializer for gRPC. Large requests stay bytes until `admitted`, after authentication."""
    assert decode is not None, method
    descriptor = _input_of(method)
    size = SIZES.get(descriptor.full_name, Size()) if descriptor is not None else Size()
    grows = descriptor is not None and can_grow(descriptor)

    def deserialize(data: bytes) -> Any:
        if len(data) <= size.most_bytes and (len(data) <= _SMALL_BYTES or not grows):
            try:
                return decode(data)
            except DecodeError:
                pass
        return Undecoded(data, decode, descriptor, size)

    return deserialize


@dataclass(eq=False)
class Undecoded:
    """The bytes of a request that is too large to decode unchecked, or that cannot be decoded.

    gRPC keeps the last request of a stream until the next one comes, so that `message` takes the bytes out.
    """

    data: bytes
    decode: Callable[[bytes], Any]
    descriptor: Descriptor | None
    size: Size

    async def message(self) -> Any:
        """Return the decoded request. It can be called once.

        Raises:
            LimitExceeded: the request is too large, or would have too many entries.
            MALFORMED_REQUEST: the bytes are not a message of the type.
        """
        name = self.descriptor.name if self.descriptor is not None else "The request"
        data, self.data = self.data, b""
        if len(data) > self.size.most_bytes:
            raise exceeded(name, Limit(self.size.most_bytes), "bytes", len(data))
        pace = Pace()
        if self.descriptor is not None:
            scan = Scan(data, self.descriptor, self.size.most_entries)
            try:
                for _ in scan.slices(_STEPS):
                    await pace.pause()
            except TooManyFields as error:
                raise exceeded(name, Limit(error.most), "entries", error.got) from None
        try:
            message = self.decode(data)
            await pace.pause()
            return message
        except DecodeError:
            raise error_for(
                "MALFORMED_REQUEST", f"The request is not a valid {name}.", "Update etfarm, or fix the program that sends it."
            ) from None


async def admitted(request: Any, turns: FairSlots | None = None, whose: str = "") -> Any:
    """Return the checked request for a servicer, or a stream whose requests are checked one by one.

    Args:
        turns: slots for the checks of large requests, shared fairly among principals; None for separate slots.
        whose: the principal of the call.

    Raises:
        LimitExceeded: the request exceeds a limit; for a stream, raised by the iteration.
        MALFORMED_REQUEST: the bytes are not a message of the type.
    """
    if isinstance(request, Message):
        return await _checked(request)
    turns = turns or FairSlots(AT_ONCE)
    return await _decoded(request, turns, whose) if isinstance(request, Undecoded) else _Checked(request, turns, whose)


async def _decoded(request: Undecoded, turns: FairSlots, whose: str) -> Message:
    async with turns.take(whose):
        return await _checked(await request.message())


async def _checked(request: Message) -> Message:
    pace = Pace()
    try:
        for _ in Check(request).slices(_STEPS):
            await pace.pause()
    except LimitExceeded as error:
        error.refused = request
        raise
    return request


class _Checked:
    """A stream of checked requests. A servicer may continue it after a refused request."""

    def __init__(self, requests: AsyncIterator[Any], turns: FairSlots, whose: str) -> None:
        self._requests = aiter(requests)
        self._turns = turns
        self._whose = whose

    def __aiter__(self) -> _Checked:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        return await admitted(request, self._turns, self._whose)


def _input_of(method: str) -> Descriptor | None:
    try:
        descriptor: Descriptor = Default().FindMethodByName(method.lstrip("/").replace("/", ".")).input_type
    except KeyError:
        return None
    return descriptor


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
