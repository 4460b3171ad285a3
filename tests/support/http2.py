"""A gRPC caller that keeps to no rule but HTTP/2's frames: what gRPC's own client would not send can be sent with it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping
from typing import Self

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_INITIAL_WINDOW = 65_535


class Http2:
    """One connection with one stream."""

    def __init__(self, address: str, *, timeout_s: float, source: str | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout_s, source_address=(source, 0) if source else None)
        self._connection_window = self._stream_window = _INITIAL_WINDOW

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def begin(self) -> None:
        """Send the preface and settings, and take the server's."""
        self.socket.sendall(PREFACE)
        self._send(SETTINGS, 0, 0, b"")
        while self._frame()[0] != SETTINGS:
            pass

    def call(self, path: str | bytes, headers: Mapping[str, str | bytes], message: bytes, *, compressed: bool) -> bool:
        """Send a call with one message, as far as the server takes it; wait for the answer's end, and return whether one came."""
        self._send(HEADERS, END_HEADERS, 1, fields(path, headers))
        body = struct.pack(">BI", compressed, len(message)) + message
        try:
            while True:
                room = min(self._connection_window, self._stream_window, 16_384)
                if body and room > 0:
                    part, body = body[:room], body[room:]
                    self._connection_window -= len(part)
                    self._stream_window -= len(part)
                    self._send(DATA, 0 if body else END_STREAM, 1, part)
                    continue
                kind, flags, _, _ = self._frame()
                if kind in (RESET, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
                    return kind == HEADERS
        except ConnectionError:
            return False

    def flood(self, path: str | bytes, calls: int) -> None:
        """Begin so many calls without an end, and read no answer."""
        block = fields(path, {})
        with contextlib.suppress(OSError):  # the server closed the connection
            self.socket.sendall(b"".join(frame(HEADERS, END_HEADERS, 2 * call + 1, block) for call in range(calls)))

    def until_closed(self) -> None:
        """Take what comes until the server has closed the connection."""
        try:
            while True:
                self._frame()
        except ConnectionError:
            return

    def _frame(self) -> tuple[int, int, int, bytes]:
        head = self._read(9)
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        stream, payload = int.from_bytes(head[5:], "big"), self._read(length)
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, length, 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    self._stream_window += value - _INITIAL_WINDOW
            self._send(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._send(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream:
                self._stream_window += more
            else:
                self._connection_window += more
        return kind, flags, stream, payload

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.socket.sendall(frame(kind, flags, stream, payload))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise ConnectionResetError("the server closed the connection")
            data += more
        return data


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame as it is sent."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def fields(path: str | bytes, headers: Mapping[str, str | bytes], *, indexed: bool = False) -> bytes:
    """Return the header block of a call; an indexed one can be repeated with `INDEXED`, if it is the connection's first."""
    named: dict[str, str | bytes] = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "farm", "te": "trailers"}
    named |= {"content-type": "application/grpc", **headers}
    return b"".join((b"\x40" if indexed else b"\0") + _text(name) + _text(value) for name, value in named.items())


INDEXED = bytes(0x80 | number for number in range(62, 68))
"""The header block of a call like the first one, without further headers: six entries of HPACK's dynamic table."""


def _text(text: str | bytes) -> bytes:
    """Return a text, or bytes that are none, as HPACK has it, without Huffman coding."""
    data = text.encode() if isinstance(text, str) else text
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, out = len(data) - 127, b"\x7f"
    while rest >= 128:
        out += bytes((rest % 128 + 128,))
        rest //= 128
    return out + bytes((rest,)) + data
