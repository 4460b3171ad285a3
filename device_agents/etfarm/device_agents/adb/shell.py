"""A command on a phone as a process: its stdin, stdout, stderr and exit code, over adb's shell protocol.

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
"""A packet's kind, and the number of bytes that follow."""
_STDIN, _STDOUT, _STDERR, _EXIT, _CLOSE_STDIN = range(5)
_PART_BYTES: Final = 1 << 16
MAX_LINE_BYTES: Final = 16 << 20
"""Default limit of a line of stdout or stderr, in bytes."""


class ShellInput:
    """The command's stdin, with the interface of asyncio.StreamWriter."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._closed = False

    def write(self, data: bytes) -> None:
        """Queue bytes; they are dropped if the command has ended.

        Raises:
            RuntimeError: the input was closed.
        """
        if self._closed:
            raise RuntimeError("the input was closed")
        view = memoryview(data)
        for start in range(0, len(view), _PART_BYTES):
            self._send(_STDIN, view[start : start + _PART_BYTES])

    async def drain(self) -> None:
        """Wait until the phone has taken most of what was written, without a deadline.

        Raises:
            ConnectionError: the command has ended, or the phone is gone.
        """
        await self._link.writer.drain()

    def close(self) -> None:
        """End the command's input; harmless if it is already closed."""
        if not self._closed:
            self._closed = True
            self._send(_CLOSE_STDIN, memoryview(b""))

    def is_closing(self) -> bool:
        """Return whether the input no longer accepts data."""
        return self._closed or self._link.writer.is_closing()

    def _send(self, kind: int, data: memoryview) -> None:
        if not self._link.writer.is_closing():  # asyncio would log each late write
            self._link.writer.write(_HEADER.pack(kind, len(data)))
            self._link.writer.write(data)


class Output(asyncio.ReadTransport):
    """The destination of one output stream: a reader with flow control."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.reader = asyncio.StreamReader(limit)
        self.reader.set_transport(self)
        self._open = asyncio.Event()
        self._open.set()

    def pause_reading(self) -> None:
        """Pause the stream; called by the reader when it holds twice its limit."""
        self._open.clear()

    def resume_reading(self) -> None:
        """Resume the stream; called by the reader after data was read from it."""
        self._open.set()

    async def feed(self, data: bytes) -> None:
        """Add bytes, then wait while the reader is full."""
        self.reader.feed_data(data)
        await self._open.wait()


async def split(source: asyncio.StreamReader, outputs: Mapping[int, Output]) -> int | None:
    """Distribute the packets of `source` to the outputs of their kinds until the exit code arrives, and return it.

    Packets of other kinds are skipped. Returns None if the source ends without an exit code.
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

    Both outputs share one connection: read both, since an output that fills up (twice its limit) stalls the other one and the
    command. There is no deadline: on a dead link every wait is endless, so callers must bound their waits.
    """

    def __init__(self, link: Link, serial: str, command: str, limit: int) -> None:
        self._link = link
        self.serial = serial
        self.stdin = ShellInput(link)
        outputs = {_STDOUT: Output(limit), _STDERR: Output(limit)}
        self.stdout = outputs[_STDOUT].reader
        self.stderr = outputs[_STDERR].reader
        self.returncode: int | None = None
        """The exit code once it has arrived: 0 to 255. 128 + N means that signal N ended the command, as seen by the phone's
        shell; 159 = SIGSYS: a system call that Android's seccomp filter refuses. None while the command runs, or if its
        exit code is lost."""
        self.lost: EtfarmError | None = None
        """A PhoneGone if the connection ended without an exit code and without `kill`; otherwise None."""
        self._killed = False
        self._pump = asyncio.create_task(self._split_outputs(outputs), name=f"shell on {serial}: {command[:40]}")
        # Not in a `finally` of the task: a task that is cancelled before its first step never reaches it.
        self._pump.add_done_callback(lambda _: self._end())

    @property
    def ended(self) -> bool:
        """Whether no more output will arrive."""
        return self._pump.done()

    def kill(self) -> None:
        """Close the connection at once; harmless if it is already closed.

        adbd then sends SIGHUP to the phone's shell; see `AdbServer.shell` for what ends with it.
        """
        self._killed = True
        self._link.abort()
        self._pump.cancel()

    async def wait(self) -> int | None:
        """Return the exit code once the readers have taken all output; None after `kill`.

        Raises:
            PhoneGone: the connection ended without an exit code: the phone or the adb server disappeared.
        """
        await asyncio.wait({self._pump})
        if not self._pump.cancelled():
            self._pump.result()
        if self.lost is not None:
            raise self.lost
        return self.returncode

    async def _split_outputs(self, outputs: Mapping[int, Output]) -> None:
        self.returncode = await split(self._link.reader, outputs)
        if self.returncode is None and not self._killed:
            self.lost = PhoneGone(self.serial, "the connection ended before the command did")

    def _end(self) -> None:
        self.stdout.feed_eof()
        self.stderr.feed_eof()
        self._link.abort()
