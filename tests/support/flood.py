"""An attacker that floods a server with frames of one kind for a bounded time, and reconnects whenever it is closed.

python -m tests.support.flood ADDRESS KIND CONNECTIONS SECONDS
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Final

from tests.support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    INDEXED,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    fields,
    frame,
)

PATH: Final = "/etfarm.v1.FarmService/GetServerInfo"
_BLOCK: Final = fields(PATH, {}, indexed=True)
_FRAMES, _SENT_BYTES, _PAUSE_S = 200, 1 << 16, 0.002
_STREAMS: Final = 256


def _call(index: int, *, resets: bool) -> bytes:
    stream = 2 * index + 1
    begin = frame(HEADERS, END_HEADERS, stream, INDEXED if index else _BLOCK)
    return begin + (frame(RESET, 0, stream, (8).to_bytes(4, "big")) if resets else b"")


KINDS: Final[dict[str, Callable[[int], bytes]]] = {
    "reset": lambda index: _call(index, resets=True),
    "headers": lambda index: _call(index, resets=False),
    "reconnect": lambda index: _call(index, resets=False),
    "reconnect-reset": lambda index: _call(index, resets=True),
    "data": lambda index: frame(DATA, 0, 1, b"") if index else _call(0, resets=False),
    "continuation": lambda index: frame(CONTINUATION if index else HEADERS, 0, 1, b""),
    "ping": lambda index: frame(PING, 0, 0, bytes(8)),
    "settings": lambda index: frame(SETTINGS, 0, 0, b""),
}
"""The frame or frames of a flood, by the number of those before it on the same connection. Those that reconnect close each
connection after as many calls as it may begin."""


class _Attacker:
    """One connection after the other."""

    def __init__(self, address: str, kind: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._frame = KINDS[kind]
        self._most = _STREAMS if kind.startswith("reconnect") else sys.maxsize
        self._socket: socket.socket | None = None
        self._index, self._waiting, self._is_acknowledged = 0, b"", False
        self.opened = self.closed = self.sent_bytes = 0

    def go_on(self) -> bool:
        """Send what the connection takes; return whether it took anything."""
        try:
            if self._socket is None:
                self._connect()
            return self._send()
        except OSError:
            self.closed += self._socket is not None
            self.close()
            return False

    def _connect(self) -> None:
        opened = socket.create_connection(self._address, 10)
        opened.setblocking(False)
        self._socket, self._index, self._is_acknowledged = opened, 0, False
        self._waiting = PREFACE + frame(SETTINGS, 0, 0, b"")
        self.opened += 1

    def _send(self) -> bool:
        assert self._socket is not None
        try:
            while answer := self._socket.recv(1 << 16):
                # A server refuses most calls of a connection until it has acknowledged the server's settings.
                self._waiting += b"" if self._is_acknowledged or not answer else frame(SETTINGS, ACK, 0, b"")
                self._is_acknowledged = True
            raise ConnectionResetError("the server closed the connection")
        except BlockingIOError:
            pass
        if self._is_acknowledged and len(self._waiting) < _SENT_BYTES:
            until = min(self._index + _FRAMES, self._most)
            self._waiting += b"".join(map(self._frame, range(self._index, until)))
            self._index = until
        try:
            sent = self._socket.send(self._waiting)
        except BlockingIOError:
            return False
        self._waiting = self._waiting[sent:]
        self.sent_bytes += sent
        if not self._waiting and self._index == self._most:
            self.close()
        return sent > 0

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def main(address: str, kind: str, connections: str, seconds: str) -> None:
    """Flood the server, and print what the attackers saw."""
    os.nice(10)
    attackers = [_Attacker(address, kind) for _ in range(int(connections))]
    until = time.monotonic() + float(seconds)
    while time.monotonic() < until:
        if not sum(attacker.go_on() for attacker in attackers):
            time.sleep(_PAUSE_S)
    for attacker in attackers:
        attacker.close()
    print(json.dumps({name: sum(getattr(each, name) for each in attackers) for name in ("opened", "closed", "sent_bytes")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
