"""A connection to the adb server: requests answered with OKAY or FAIL, until it becomes a stream to the phone."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from etfarm.device_agents.adb.address import parse
from etfarm.device_agents.adb.errors import AdbRefused, AdbServerMissing, PhoneGone

_BUFFER_BYTES: Final = 1 << 18
_QUEUE_S: Final = 0.005
"""Time in which the server accepts a connection or two from its queue."""
_MAX_REQUEST_BYTES: Final = 0xFFFF
"""Largest number that four hexadecimal digits can represent."""


class Link:
    """An open connection without deadlines; callers bound their waits and call `abort` at the end."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str) -> Link:
        """Return a connection to the server at `address`; see `address.parse`.

        Raises:
            AdbServerMissing: nothing listens there.
            ADB_ADDRESS_MALFORMED: the address is not valid.
        """
        endpoint = parse(address)
        try:
            if endpoint.path:
                reader, writer = await asyncio.open_unix_connection(sock=await _connected(endpoint.path), limit=_BUFFER_BYTES)
            else:
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=_BUFFER_BYTES)
        except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
            raise AdbServerMissing(address, getattr(error, "strerror", None) or str(error)) from error
        return cls(address, reader, writer)

    async def request(self, service: str, serial: str = "") -> None:
        """Request a service and wait for the OKAY.

        Args:
            service: a service name from SERVICES.TXT; at most 65535 bytes.
            serial: the phone's serial; empty for a service of the server itself.

        Raises:
            AdbRefused: the server replied FAIL.
            PhoneGone: the server does not know the phone, or the phone vanished before it answered.
            AdbServerMissing: the connection ended, or the peer is not an adb server.
        """
        encoded = service.encode("utf-8", "surrogateescape")
        if len(encoded) > _MAX_REQUEST_BYTES:
            raise ValueError(f"a request of {len(encoded)} bytes, but adb takes {_MAX_REQUEST_BYTES}: send it as input")
        try:
            self.writer.write(b"%04x%b" % (len(encoded), encoded))
            await self.writer.drain()
            answer = await self.reader.readexactly(4)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise AdbServerMissing(self._address, "it ended the connection") from error
        if answer == b"OKAY":
            return
        if answer != b"FAIL":
            raise AdbServerMissing(self._address, f"what listens there answers {answer!r}, which is not adb")
        text = await self.text()
        if serial and _means_phone_missing(text, serial):
            raise PhoneGone(serial, f"adb says: {text.strip()}")
        raise AdbRefused(serial, text)

    async def text(self) -> str:
        """Return a length-prefixed text.

        Raises:
            AdbServerMissing: the connection ended, or the peer is not an adb server.
        """
        try:
            length = await self.reader.readexactly(4)
            return (await self.reader.readexactly(length_of(length))).decode("utf-8", "replace")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise AdbServerMissing(self._address, "it ended the connection") from error
        except ValueError as error:
            raise AdbServerMissing(self._address, f"{error}, which is not adb") from error

    def abort(self) -> None:
        """Close the connection at once, whatever is in progress; harmless if it is already closed."""
        self.writer.transport.abort()


async def _connected(path: str) -> socket.socket:
    """Return a connection to a unix domain socket; wait while the server's backlog is full, which for adb is four connections."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(path)
                return connection
            # EAGAIN: asyncio would treat this as a connection in progress, and then as an open one.
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_S)
    except BaseException:
        connection.close()
        raise


def length_of(digits: bytes) -> int:
    """Return the number that four hexadecimal digits represent.

    Raises:
        ValueError: `digits` is not four hexadecimal digits.
    """
    # int() alone would accept signs, spaces and underscores.
    if len(digits) != 4 or not all(digit in b"0123456789abcdefABCDEF" for digit in digits):
        raise ValueError(f"a length of {digits!r}")
    return int(digits, 16)


def _means_phone_missing(text: str, serial: str) -> bool:
    """Return whether adb's message means that the phone is missing; adb says `closed` if it disappears during a request."""
    return text.strip() == "closed" or (serial in text and "not found" in text)
