"""The head of an ExecuTorch program: its format's identifier, and the extended header that says where its parts lie.

A .pte is a FlatBuffer, which `etfarm.wire.program_tables` reads, with optional segments after it for weights and delegates' data.
Only the extended header tells where the segments start and how long the whole file is.

Source: executorch/schema/extended_header.cpp, written by executorch/exir/_serialize/_program.py (_ExtendedHeader).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from etfarm.wire.flatbuffer import BadBuffer, Buffer

IDENTIFIER: Final = b"ET12"
"""Identifier of the format that ExecuTorch 1.x writes and loads."""
FAMILY: Final = b"ET"
"""Start of the identifiers of all versions of the format."""
HEAD_BYTES: Final = 40
"""Number of bytes at the start of a file that contain the identifier and the whole extended header."""
MIN_HEADER_BYTES: Final = 24
"""Smallest length that an extended header may declare: the length of its first version, which lacks `segment_bytes`."""

_MAGIC: Final = b"eh00"
_POSITION: Final = 8
_LENGTH_WITH_SEGMENT_BYTES: Final = 32
_FIELDS: Final = struct.Struct("<4sI3Q")


class HeaderCutOff(BadBuffer):
    """A file that ends within its extended header."""


@dataclass(frozen=True)
class ExtendedHeader:
    """The sizes and positions that a program declares; a hostile file may declare any."""

    length: int
    """Length of the header itself in bytes; an invalid header declares less than `MIN_HEADER_BYTES`."""
    program_bytes: int
    """Size of the FlatBuffer, from the start of the file."""
    segments_start: int
    """Position of the first segment; 0 if there is none."""
    segment_bytes: int
    """Size of all segments; 0 if there is none, or if the header's version does not say."""

    @property
    def file_bytes(self) -> int:
        """The smallest size that the whole file can have."""
        return max(self.program_bytes, self.segments_start + self.segment_bytes)

    def segment(self, file: Buffer, offset: int, size: int) -> Buffer:
        """Return the bytes of a segment that the program lists; shorter where the file ends within it."""
        start = self.segments_start + offset
        return file[start : start + size]


def identifier_of(head: Buffer) -> bytes:
    """Return the identifier of a FlatBuffer's format, of at most 4 bytes; less if the file ends within it."""
    return bytes(head[4:8])


def read_extended_header(head: Buffer) -> ExtendedHeader | None:
    """Return the extended header of a program from its first `HEAD_BYTES` bytes or more; None if it has none.

    Raises:
        HeaderCutOff: the bytes end within the header.
    """
    if bytes(head[_POSITION : _POSITION + len(_MAGIC)]) != _MAGIC:
        return None
    if len(head) < HEAD_BYTES:
        raise HeaderCutOff(f"its extended header ends at byte {HEAD_BYTES}, and it has {len(head)}")
    _, length, program_bytes, segments_start, segment_bytes = _FIELDS.unpack_from(head, _POSITION)
    if length < _LENGTH_WITH_SEGMENT_BYTES:
        segment_bytes = 0
    return ExtendedHeader(length, program_bytes, segments_start, segment_bytes)
