"""Frames on a child's channel: one byte for the kind, a little-endian u32 length, the data."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Final

from etfarm.server.workers.errors import BadAnswer

FILES: Final = b"f"
"""Kind of the first frame to a child: a JSON list of the files that it may read."""
REQUEST: Final = b"q"
EVENT: Final = b"e"
RESULT: Final = b"r"
ERROR: Final = b"x"

MAX_ANSWER_BYTES: Final = 64 << 20
"""Maximum size of a frame from a child; bulk data travels as files in the child's folder."""

_HEADER: Final = struct.Struct("<cI")


class FrameWriter:
    """The child's end of the channel. Several threads may send frames."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, kind: bytes, data: bytes) -> None:
        """Send one frame; block while the daemon does not read."""
        if len(data) > MAX_ANSWER_BYTES:
            raise BadAnswer(f"An answer of {len(data)} bytes is above {MAX_ANSWER_BYTES}; use a file.")
        with self._lock:
            self._channel.sendall(_HEADER.pack(kind, len(data)))
            self._channel.sendall(data)


def encode(kind: bytes, data: bytes) -> bytes:
    """Return a frame as bytes."""
    return _HEADER.pack(kind, len(data)) + data


def receive(channel: socket.socket) -> tuple[bytes, bytes]:
    """Return the next frame's kind and data; block until it has arrived.

    Raises:
        EOFError: the other end closed before a whole frame arrived.
    """
    kind, size = _HEADER.unpack(_receive_exactly(channel, _HEADER.size))
    return kind, _receive_exactly(channel, size)


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the channel closed in the middle of a frame")
        parts += part
    return bytes(parts)


async def read(reader: asyncio.StreamReader) -> tuple[bytes, bytes] | None:
    """Return the next frame of a child, or None when its channel has ended; a truncated frame counts as the end.

    Raises:
        BadAnswer: the frame is larger than `MAX_ANSWER_BYTES`.
    """
    try:
        kind, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if size > MAX_ANSWER_BYTES:
            raise BadAnswer(f"A child announced {size} bytes, above {MAX_ANSWER_BYTES}.")
        return kind, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None
