"""The bytes between the connector and a node's actor: what a child wrote, in pieces, and answers that may be errors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

from etfarm.server.workers import errors
from etfarm.server.workers.errors import BadAnswer
from etfarm.wire.errors import EtfarmError

CHANNEL: Final = b"c"
LOG: Final = b"l"
STATUS: Final = b"s"
"""Kinds of a child's bytes, by the end that they were read from."""
END: Final = b"z"
"""Kind of the last piece: JSON of the child's files, `[[name, size, digest], ...]`."""

PIECE_BYTES: Final = 4 << 20
"""Size of the pieces in which files are sent."""

_HEADER: Final = struct.Struct("<cI")
_DONE: Final = b"+"
_FAILED: Final = b"-"


def join(pieces: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return pieces (kind, data) as bytes."""
    return b"".join(_HEADER.pack(kind, len(data)) + data for kind, data in pieces)


def split(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pieces that `join` was given.

    Raises:
        BadAnswer: the data is truncated.
    """
    place = 0
    while place < len(data):
        if len(data) - place < _HEADER.size:
            raise BadAnswer("A compile node sent a truncated piece.")
        kind, size = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        if len(data) - place < size:
            raise BadAnswer("A compile node sent a truncated piece.")
        yield kind, data[place : place + size]
        place += size


def encode_result(data: bytes) -> bytes:
    """Return the answer of a call that succeeded."""
    return _DONE + data


def encode_error(error: EtfarmError) -> bytes:
    """Return the answer of a call that raised an error."""
    return _FAILED + errors.to_json(error)


def decode_answer(answer: object) -> bytes:
    """Return the result in an answer.

    Raises:
        EtfarmError: the answer is an error.
        BadAnswer: it is anything but bytes.
    """
    if not isinstance(answer, bytes):
        raise BadAnswer(f"A compile node answered with {type(answer).__name__[:50]} instead of bytes.")
    if answer[:1] == _FAILED:
        raise errors.from_json(answer[1:])
    return answer[1:]
