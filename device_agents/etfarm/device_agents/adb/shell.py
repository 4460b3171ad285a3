"""A command on a phone as a process: its stdin, stdout, stderr and exit code, by adb's shell protocol.

Source: AOSP's packages/modules/adb/shell_protocol.h.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from typing import Final

from etfarm.device_agents.adb.errors import PhoneGone
from etfarm.device_agents.adb.link import Link
from etfarm.wire.errors import EtfarmError

_HEADER: Final = struct.Struct("<BI")
"""What a packet is, and the bytes that follow."""
_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN = range(5)
_PART_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 16 << 20
"""Of stdout and stderr, where nobody says otherwise."""


class ShellInput:
    """What the command reads; as asyncio.StreamWriter."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._closed = False

    def write(self, data: bytes) -> None:
        """Queues bytes; they are dropped where the command has ended.

        Raises:
            RuntimeError: after `close`.
        """
        if self._closed:
            raise RuntimeError("the input was closed")
        view = memoryview(data)
        for start in range(0, len(view), _PART_BYTES):
            self._send(_STDIN, view[start : start + _PART_BYTES])

    async def drain(self) -> None:
        """Waits until the phone has taken most of what was written. It has no deadline.

        Raises:
            ConnectionError: the command has ended, or its phone is gone.
        """
        await self._link.writer.drain()

    def close(self) -> None:
        """The end of the command's input; harmless where it was closed."""
        if not self._closed:
            self._closed = True
            self._send(_CLOSE_STDIN, memoryview(b""))

    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self._closed or self._link.writer.is_closing()

    def _send(self, kind: int, data: memoryview) -> None:
        if not self._link.writer.is_closing():  # asyncio would log each write that comes too late
            self._link.writer.write(_HEADER.pack(kind, len(data)))
            self._link.writer.write(data)


class Output(asyncio.ReadTransport):
    """Where one of the streams goes: a reader, and whether it takes more."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.reader = asyncio.StreamReader(limit)
        self.reader.set_transport(self)
        self._open = asyncio.Event()
        self._open.set()

    def pause_reading(self) -> None:
        """By the reader: it holds twice its limit."""
        self._open.clear()

    def resume_reading(self) -> None:
        """By the reader: it was read from."""
        self._open.set()

    async def feed(self, data: bytes) -> None:
        """Adds bytes, then waits while the reader is full."""
        self.reader.feed_data(data)
        await self._open.wait()


async def split(source: asyncio.StreamReader, outputs: Mapping[int, Output]) -> int | None:
    """Deals the packets of `source` to the outputs of their kinds until the exit code, which is returned.

    Packets of other kinds are skipped. None: the source ended without an exit code.
    """
    try:
        while True:
            kind, size = _HEADER.unpack(await source.readexactly(_HEADER.size))
            if kind == _EXIT:
                return (await source.readexactly(1))[0] if size else None
            while size:
                part = await source.read(min(size, _PART_BYTES))
                if not part:
                    return None
                size -= len(part)
                if kind in outputs:
                    await outputs[kind].feed(part)
    except (asyncio.IncompleteReadError, OSError):
        return None


class ShellProcess:
    """A command that runs on a phone, used like an asyncio.subprocess.Process.

    Both outputs come over one connection: read both, or one that fills up (twice its limit) stops the other, and the command.
    There is no deadline: on a dead link everything waits for ever, so whoever uses it bounds its waits.
    """

    def __init__(self, link: Link, serial: str, command: str, limit: int) -> None:
        self._link = link
        self.serial = serial
        self.stdin = ShellInput(link)
        outputs = {_STDOUT: Output(limit), _STDERR: Output(limit)}
        self.stdout = outputs[_STDOUT].reader
        self.stderr = outputs[_STDERR].reader
        self.returncode: int | None = None
        """The exit code once it came: 0 to 255. 128 + N says that the phone's shell saw signal N end the command, 159 = SIGSYS:
        a system call that Android's seccomp filter does not let through. None: it runs, or nobody can know."""
        self.lost: EtfarmError | None = None
        """A PhoneGone where the connection ended without an exit code and without `kill`."""
        self._killed = False
        self._pump = asyncio.create_task(self._deal(outputs), name=f"shell on {serial}: {command[:40]}")
        # Not in a `finally` of the task: one that is cancelled before its first step never gets there.
        self._pump.add_done_callback(lambda _: self._end())

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._pump.done()

    def kill(self) -> None:
        """Closes the connection now; harmless where it is closed.

        adbd then sends SIGHUP to the phone's shell; see `AdbServer.shell` for what ends with it.
        """
        self._killed = True
        self._link.abort()
        self._pump.cancel()

    async def wait(self) -> int | None:
        """The exit code, once all that the command wrote was taken by the readers; None after `kill`.

        Raises:
            PhoneGone: the connection ended without an exit code: the phone, or the adb server, is gone.
        """
        await asyncio.wait({self._pump})
        if not self._pump.cancelled():
            self._pump.result()
        if self.lost is not None:
            raise self.lost
        return self.returncode

    async def _deal(self, outputs: Mapping[int, Output]) -> None:
        self.returncode = await split(self._link.reader, outputs)
        if self.returncode is None and not self._killed:
            self.lost = PhoneGone(self.serial, "the connection ended before the command did")

    def _end(self) -> None:
        self.stdout.feed_eof()
        self.stderr.feed_eof()
        self._link.abort()
