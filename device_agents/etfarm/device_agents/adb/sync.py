"""File transfers to and from a phone over adb's sync protocol, in chunks, with back-pressure and a limit on silence.

Source: AOSP's packages/modules/adb/SYNC.TXT and file_sync_protocol.h.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import stat
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from etfarm.device_agents.adb.errors import PhoneFileRefused, PhoneGone, PhoneSilent, file_refusal, phone_answer_too_long
from etfarm.device_agents.adb.link import Link

_CHUNK_BYTES: Final = 64 << 10
"""Largest chunk that SYNC.TXT allows."""
_HEADER: Final = struct.Struct("<4sI")
_STAT: Final = struct.Struct("<III")
"""mode, size, mtime; they follow the id STAT."""
_STAT_V2: Final = struct.Struct("<IQQIIIIQqqq")
"""error, dev, ino, mode, nlink, uid, gid, size, atime, mtime, ctime; they follow the id STA2."""
_MAX_REFUSAL_BYTES: Final = 1 << 16

OnProgress = Callable[[int, int], None]
"""Callback that takes the bytes done and their total, both since the beginning; the total may be too small if a file grows."""


@dataclass(frozen=True)
class RemoteFile:
    """A file's status on the phone, with links followed."""

    mode: int
    """Kind and permissions, as st_mode."""
    size_bytes: int
    """Size in bytes; modulo 2**32 from a phone without STAT2 (before Android 8)."""
    mtime_s: int
    """Modification time in seconds since the epoch, by the phone's clock."""

    @property
    def is_folder(self) -> bool:
        """Whether the file is a directory."""
        return stat.S_ISDIR(self.mode)


class Sync:
    """A connection that transfers files of one phone, one at a time."""

    def __init__(self, link: Link, serial: str, silence_s: float) -> None:
        self._link = link
        self._serial = serial
        self._silence_s = silence_s

    async def stat(self, remote: str, *, v2: bool) -> RemoteFile | None:
        """Return the file at `remote`, or None if there is none.

        Args:
            remote: path on the phone.
            v2: whether the phone has the feature `stat_v2`.

        Raises:
            PhoneFileRefused: the phone refuses to report it, for example because a parent folder is not readable.
            PhoneGone, PhoneSilent: the connection failed.
        """
        during = f"asking for {remote}"
        request_id = b"STA2" if v2 else b"STAT"
        await self._send(_request(request_id, self._path(remote)), during)
        answer = await self._receive(4, during)
        if answer == b"FAIL":
            (size,) = struct.unpack("<I", await self._receive(4, during))
            raise await self._refusal(remote, size, during)
        if answer != request_id:
            raise self._unexpected_answer(remote, answer)
        if not v2:
            mode, size, mtime = _STAT.unpack(await self._receive(_STAT.size, during))
            return RemoteFile(mode, size, mtime) if mode else None
        number, _, _, mode, _, _, _, size, _, mtime, _ = _STAT_V2.unpack(await self._receive(_STAT_V2.size, during))
        if number == 0:
            return RemoteFile(mode, size, mtime)
        # The phone's error numbers are those of Linux, as on this machine.
        if number in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise file_refusal(self._serial, remote, os.strerror(number))

    async def push(self, source: Path | bytes, remote: str, mode: int, mtime_s: int, on_progress: OnProgress | None) -> int:
        """Write `source` to the file `remote`, creating its parent folders; return the number of bytes sent.

        Raises:
            PhoneFull: the phone has no room.
            PhoneFileRefused: the phone refuses to write it.
            PhoneGone, PhoneSilent: the connection failed.
        """
        during = f"writing {remote}"
        await self._send(_request(b"SEND", self._path(f"{remote},{stat.S_IFREG | mode}")), during)
        # The phone refuses as soon as it detects the error, and then discards the rest.
        answer = asyncio.create_task(self._link.reader.readexactly(_HEADER.size), name=f"push to {self._serial}")
        try:
            with _opened(source) as (file, total):
                done = 0
                while not answer.done() and (chunk := file.read(_CHUNK_BYTES)):
                    await self._send(_HEADER.pack(b"DATA", len(chunk)) + chunk, during, unless=answer)
                    done += len(chunk)
                    if on_progress is not None:
                        on_progress(done, total)
            if not answer.done():
                await self._send(_HEADER.pack(b"DONE", mtime_s & 0xFFFFFFFF), during, unless=answer)
            async with self._silence_limit(during):
                kind, size = _HEADER.unpack(await answer)
        finally:
            answer.cancel()
            await asyncio.wait({answer})
            if not answer.cancelled():
                answer.exception()  # the end of the connection, already reported by another error
        if kind == b"FAIL":
            raise await self._refusal(remote, size, during)
        if kind != b"OKAY":
            raise self._unexpected_answer(remote, kind)
        return done

    async def pull(self, remote: str, file: BinaryIO, total: int, on_progress: OnProgress | None, max_bytes: int | None) -> int:
        """Copy the file `remote` into `file`; return the number of bytes received.

        Raises:
            PhoneFileMissing: the file does not exist.
            PhoneFileRefused: the phone refuses to read it.
            PHONE_ANSWER_TOO_LONG: the file has more than `max_bytes`.
            PhoneGone, PhoneSilent: the connection failed.
        """
        during = f"reading {remote}"
        await self._send(_request(b"RECV", self._path(remote)), during)
        done = 0
        while True:
            kind, size = _HEADER.unpack(await self._receive(_HEADER.size, during))
            if kind == b"DONE":
                return done
            if kind == b"FAIL":
                raise await self._refusal(remote, size, during)
            if kind != b"DATA" or size > _CHUNK_BYTES:
                raise self._unexpected_answer(remote, kind)
            done += size
            if max_bytes is not None and done > max_bytes:
                raise phone_answer_too_long(self._serial, during, max_bytes)
            file.write(await self._receive(size, during))
            if on_progress is not None:
                on_progress(done, max(done, total))

    def _path(self, remote: str) -> bytes:
        return remote.encode("utf-8", "surrogateescape")

    async def _send(self, data: bytes, during: str, unless: asyncio.Task[bytes] | None = None) -> None:
        """Send with back-pressure; once `unless` is done, its result explains why nothing more can be sent."""
        async with self._silence_limit(during):
            try:
                self._link.writer.write(data)
                await self._link.writer.drain()
            except ConnectionError:
                if unless is None:
                    raise

    async def _receive(self, size: int, during: str) -> bytes:
        async with self._silence_limit(during):
            return await self._link.reader.readexactly(size)

    async def _refusal(self, remote: str, size: int, during: str) -> Exception:
        text = await self._receive(min(size, _MAX_REFUSAL_BYTES), during)
        return file_refusal(self._serial, remote, text.decode("utf-8", "replace"))

    def _unexpected_answer(self, remote: str, answer: bytes) -> PhoneFileRefused:
        return PhoneFileRefused(self._serial, remote, f"its answer {answer!r} is not of the sync protocol")

    @asynccontextmanager
    async def _silence_limit(self, during: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._silence_s):
                yield
        except TimeoutError as error:
            raise PhoneSilent(self._serial, during, self._silence_s) from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PhoneGone(self._serial, during) from error


def _request(kind: bytes, path: bytes) -> bytes:
    return _HEADER.pack(kind, len(path)) + path


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[BinaryIO, int]]:
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        yield file, len(source) if isinstance(source, bytes) else source.stat().st_size
