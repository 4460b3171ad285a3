"""A bounded reader of untrusted .tar, .tar.gz and .tar.xz archives, for runner bundles on the server and on agents.

Python's own reader loads headers of any size into memory, unpacks a small archive without a limit, and follows links and sparse
files. This one supports plain files only and reads every byte once.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

_BLOCK: Final = tarfile.BLOCKSIZE
_READ_BYTES: Final = 1 << 18
_XZ_MEMORY_BYTES: Final = 128 << 20
"""Memory limit of the xz decoder: enough for xz -9, which takes 65 MiB; headers may ask for gigabytes."""
_SKIPPED: Final = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
"""Types of headers with extended times and owners, which are not needed here."""
_SKIPPED_BYTES: Final = 64 << 10
_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"


class BadArchive(ValueError):
    """An archive that is unsupported, damaged, or exceeds its bounds."""


@dataclass(frozen=True)
class Member:
    """A member of an archive, as its header describes it."""

    name: str
    size_bytes: int
    mode: int
    is_file: bool
    """Whether it is a plain file; other members have no content here."""


class Content:
    """The bytes of one member, read once and in order."""

    def __init__(self, source: _Source, size_bytes: int) -> None:
        self._source = source
        self._left = size_bytes

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, by default all that remain; empty at the end.

        Raises:
            BadArchive: the archive is cut off.
        """
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._source.exactly(wanted)
        self._left -= wanted
        return data


def members(file: BinaryIO, *, max_bytes: int, max_members: int) -> Iterator[tuple[Member, Content]]:
    """Yield each member with its content; content that the caller does not read is skipped.

    Args:
        file: the archive, open at its beginning.
        max_bytes: limit of all unpacked bytes, headers included.
        max_members: limit of the number of members.

    Raises:
        BadArchive: the file is not a supported archive, is cut off, or exceeds a bound.
        OSError: the file cannot be read.
    """
    source = _Source(file, max_bytes)
    count = 0
    while (header := source.exactly(_BLOCK, may_end=count > 0)) and header.strip(b"\0"):
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise BadArchive(f"a header of its tar is damaged ({error})") from None
        is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
        if info.size < 0:
            raise BadArchive(f"{info.name!r} has a size of {info.size}")
        if info.type in _SKIPPED:
            if info.size > _SKIPPED_BYTES:
                raise BadArchive(f"a header of its tar has {info.size} bytes")
            source.skip(_padded(info.size))
            continue
        count += 1
        if count > max_members:
            raise BadArchive(f"it holds more than {max_members} files")
        if is_file and info.size > max_bytes:
            raise BadArchive(f"it unpacks to more than {max_bytes} bytes")
        # A link's header may have a size, but no content follows it.
        size = info.size if is_file else 0
        end = source.position + _padded(size)
        yield Member(info.name, size, info.mode, is_file), Content(source, size)
        source.skip(end - source.position)
    if count == 0:
        raise BadArchive("it is not a tar file, or is empty")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class _Source:
    """The archive's unpacked bytes, bounded in total."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._most = max_bytes
        self._buffer = bytearray()
        self._packed = file.read(_READ_BYTES)
        self._unpack = self._opened()
        self._ended = False
        self.position = 0

    def exactly(self, size: int, *, may_end: bool = False) -> bytes:
        """Return the next `size` bytes; empty at the end of the archive if `may_end`."""
        while len(self._buffer) < size:
            part = self._next()
            if not part:
                if may_end and not self._buffer:
                    return b""
                raise BadArchive("it is cut off")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self.position += size
        return data

    def skip(self, size: int) -> None:
        """Skip bytes without keeping them."""
        while size > 0:
            size -= len(self.exactly(min(size, _READ_BYTES)))

    def _next(self) -> bytes:
        if self.position + len(self._buffer) > self._most:
            raise BadArchive(f"it unpacks to more than {self._most} bytes")
        try:
            return self._unpacked()
        except (zlib.error, lzma.LZMAError) as error:
            raise BadArchive(str(error)) from None

    def _opened(self) -> zlib._Decompress | lzma.LZMADecompressor | None:
        if self._packed.startswith(_GZIP):
            return zlib.decompressobj(31)
        if self._packed.startswith(_XZ):
            return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
        return None

    def _unpacked(self) -> bytes:
        """Return the next unpacked bytes; empty at the end."""
        while not self._ended:
            unpack = self._unpack
            if unpack is None:
                data, self._packed = self._packed or self._file.read(_READ_BYTES), b""
                return data
            if unpack.eof:
                # Another stream may follow; anything else is padding.
                self._packed = unpack.unused_data or self._file.read(_READ_BYTES)
                self._unpack = self._opened()
                self._ended = self._unpack is None
                continue
            needs_input = unpack.needs_input if isinstance(unpack, lzma.LZMADecompressor) else True
            if not self._packed and needs_input:
                self._packed = self._file.read(_READ_BYTES)
                if not self._packed:
                    raise BadArchive("it is cut off")
            if isinstance(unpack, lzma.LZMADecompressor):
                packed, self._packed = (self._packed, b"") if needs_input else (b"", self._packed)
                data = unpack.decompress(packed, _READ_BYTES)
            else:
                data = unpack.decompress(self._packed, _READ_BYTES)
                self._packed = unpack.unconsumed_tail
            if data:
                return data
        return b""
