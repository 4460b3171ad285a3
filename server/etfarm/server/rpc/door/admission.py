"""Decoding of requests and their check against the limits, before a servicer sees them.

Large requests are checked in slices, between which the event loop serves other calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError, Message

from etfarm.server.rpc.door.limits import SIZES, Check, Limit, LimitExceeded, Size, exceeded
from etfarm.server.rpc.door.wire_scan import Scan, TooManyFields, can_grow
from etfarm.server.workers.fair_slots import FairSlots
from etfarm.server.workers.pacing import Pace
from etfarm.wire.errors import error_for

_SMALL_BYTES: Final = 64 << 10
"""Maximum size of requests that are decoded unchecked, since they cannot expand beyond a few MiB."""

_STEPS: Final = 300
"""Number of fields that are checked between two checks of the clock: about 0.3 ms."""

AT_ONCE: Final = 1
"""Number of large requests that are checked at a time: more would only delay other callers."""


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
