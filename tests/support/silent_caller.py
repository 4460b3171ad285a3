"""A gRPC caller that begins calls and reads next to nothing of their responses."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from google.protobuf.message import Message

from tests.support import http2
from tests.support.http2 import Http2

_WINDOW_BYTES = 4
_SETTING_OF_WINDOW = 4


class SilentCaller(Http2):
    """One connection with many calls, each of whose responses may send four bytes."""

    def __init__(self, address: str, token: str, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._headers: Mapping[str, str] = {"authorization": f"Bearer {token}"}
        self._calls = 0
        self.answered: set[int] = set()
        """Streams of the calls whose responses have begun to arrive."""

    def begin(self) -> None:
        """Send the preface and settings, and take the server's."""
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(http2.SETTINGS, 0, 0, struct.pack(">HI", _SETTING_OF_WINDOW, _WINDOW_BYTES))
        while self._frame()[0] != http2.SETTINGS:
            pass

    def ask(self, rpc: str, request: Message) -> None:
        """Begin a call with a small request, and do not wait for its response."""
        stream, data = 2 * self._calls + 1, request.SerializeToString()
        self._calls += 1
        self._send(http2.HEADERS, http2.END_HEADERS, stream, http2.fields(f"/etfarm.v1.{rpc}", self._headers))
        self._send(http2.DATA, http2.END_STREAM, stream, struct.pack(">BI", 0, len(data)) + data)

    def until_answered(self, calls: int) -> None:
        """Wait until so many calls have begun to be answered."""
        while len(self.answered) < calls:
            self._frame()

    def _frame(self) -> tuple[int, int, int, bytes]:
        kind, flags, stream, payload = super()._frame()
        if kind == http2.DATA and payload:
            self.answered.add(stream)
        return kind, flags, stream, payload
