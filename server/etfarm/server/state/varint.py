"""Variable-length integers of encoded protobuf messages, for code that inspects messages without decoding them.

Source: https://protobuf.dev/programming-guides/encoding/#varints
"""

from __future__ import annotations

_MAX_BITS = 70


def read_varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the integer at `start` and the position after it; 0 and `end` if it does not end before `end`."""
    value = shift = 0
    while start < end and shift < _MAX_BITS:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
    return 0, end


def encode_varint(number: int) -> bytes:
    """Return the encoding of an integer that is not negative."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
