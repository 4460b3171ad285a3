"""One connection to the adb server: requests with their OKAY or FAIL, until it becomes a stream to the phone."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from etfarm.device_agents.adb.address import parse
from etfarm.device_agents.adb.errors import AdbRefused, AdbServerMissing, PhoneGone

_BUFFER_BYTES: Final = 1 << 18
_QUEUE_S: Final = 0.005
"""Until the server has taken a connection or two from its queue."""
_MAX_REQUEST_BYTES: Final = 0xFFFF
"""What four hexadecimal digits can say."""


class Link:
    """An open connection. It has no deadlines of its own: whoever waits on it sets them, and calls `abort` in the end."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._address = address
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str) -> Link:
        """A connection to the server at `address`; see `address.parse`.

        Raises:
            AdbServerMissing: nobody listens there.
            AdbAddressMalformed: it is no address.
        """
        endpoint = parse(address)
        try:
            if endpoint.path:
                reader, writer = await asyncio.open_unix_connection(sock=await _connected(endpoint.path), limit=_BUFFER_BYTES)
            else:
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, limit=_BUFFER_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise AdbServerMissing(address, getattr(error, "strerror", None) or str(error)) from error
        return cls(address, reader, writer)

    async def request(self, service: str, serial: str = "") -> None:
        """Asks for a service and waits for the OKAY.

        Args:
            service: as SERVICES.TXT has them; at most 65535 bytes.
            serial: the phone that it is about; empty where it is about the server.

        Raises:
            AdbRefused: the server said FAIL.
            PhoneGone: it knows no such phone, or the phone vanished before it answered.
            AdbServerMissing: the server went away, or is no adb server.
        """
        encoded = service.encode("utf-8", "surrogateescape")
        if len(encoded) > _MAX_REQUEST_BYTES:
            raise ValueError(f"a request of {len(encoded)} bytes, of which adb takes {_MAX_REQUEST_BYTES}: send it as input")
        try:
            self.writer.write(b"%04x%b" % (len(encoded), encoded))
            await self.writer.drain()
            answer = await self.reader.readexactly(4)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise AdbServerMissing(self._address, "it ended the connection") from error
        if answer == b"OKAY":
            return
        if answer != b"FAIL":
            raise AdbServerMissing(self._address, f"what listens there answers {answer!r}, which is no adb")
        text = await self.text()
        if serial and _tells_of_absence(text, serial):
            raise PhoneGone(serial, f"adb says: {text.strip()}")
        raise AdbRefused(serial, text)

    async def text(self) -> str:
        """A text with its length before it.

        Raises:
            AdbServerMissing: the server went away, or is no adb server.
        """
        try:
            length = await self.reader.readexactly(4)
            return (await self.reader.readexactly(length_of(length))).decode("utf-8", "replace")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise AdbServerMissing(self._address, "it ended the connection") from error
        except ValueError as error:
            raise AdbServerMissing(self._address, f"{error}, which is no adb") from error

    def abort(self) -> None:
        """Closes it now, whatever is still under way; harmless where it is closed."""
        self.writer.transport.abort()


async def _connected(path: str) -> socket.socket:
    """A connection to a unix domain socket, waited for where the server's queue of connections is full: adb's holds four."""
    made = socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        while True:
            try:
                made.connect(path)
                return made
            # EAGAIN. asyncio takes it for a connection that is under way, and then for an open one.
            except BlockingIOError:
                await asyncio.sleep(_QUEUE_S)
    except BaseException:
        made.close()
        raise


def length_of(digits: bytes) -> int:
    """The number that four hexadecimal digits say.

    Raises:
        ValueError: they are something else.
    """
    # int() alone would take signs, spaces and underscores.
    if len(digits) != 4 or not all(digit in b"0123456789abcdefABCDEF" for digit in digits):
        raise ValueError(f"a length of {digits!r}")
    return int(digits, 16)


def _tells_of_absence(text: str, serial: str) -> bool:
    """Whether adb's words say that the phone is not there; `closed` is what it says of one that goes while it is asked."""
    return text.strip() == "closed" or (serial in text and "not found" in text)
