"""Members of a .tar, .tar.gz or .tar.xz of others, one after the other, within bounds: for runner bundles, at both ends.

Python's own reader takes headers of any size into memory, goes on for as long as a small archive unpacks, and follows links and
sparse files. This one knows plain files alone and reads every byte once.
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
"""For xz -9, which takes 65 MiB, and not for a header that announces gigabytes."""
_SKIPPED: Final = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
"""Headers that say more of times and owners, which nothing here needs."""
_SKIPPED_BYTES: Final = 64 << 10
_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"


class BadArchive(ValueError):
    """Bytes are no such archive, or one beyond its bounds."""


@dataclass(frozen=True)
class Member:
    """What a header says."""

    name: str
    size_bytes: int
    mode: int
    is_file: bool
    """A plain file; anything else has no content here."""


class Content:
    """The bytes of one member, read once and in order."""

    def __init__(self, source: _Source, size_bytes: int) -> None:
        self._source = source
        self._left = size_bytes

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, all that are left by default; empty at the end.

        Raises:
            BadArchive: the archive ends before.
        """
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._source.exactly(wanted)
        self._left -= wanted
        return data


def members(file: BinaryIO, *, max_bytes: int, max_members: int) -> Iterator[tuple[Member, Content]]:
    """Yield each member with its content; what was not read of it is skipped.

    Args:
        file: the archive, open at its beginning.
        max_bytes: of all that is unpacked, headers included.
        max_members: headers of files.

    Raises:
        BadArchive: it is no such archive, is cut off, or goes beyond a bound.
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
        # A link says a size, too, and has no content.
        size = info.size if is_file else 0
        end = source.position + _padded(size)
        yield Member(info.name, size, info.mode, is_file), Content(source, size)
        source.skip(end - source.position)
    if count == 0:
        raise BadArchive("it is no tar, or an empty one")


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


class _Source:
    """The archive's bytes unpacked, with a bound on them all."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file = file
        self._most = max_bytes
        self._buffer = bytearray()
        self._packed = file.read(_READ_BYTES)
        self._unpack = self._opened()
        self._ended = False
        self.position = 0

    def exactly(self, size: int, *, may_end: bool = False) -> bytes:
        """Return the next `size` bytes; empty at the end where that `may_end`."""
        while len(self._buffer) < size:
            part = self._next()
            if not part:
                if may_end and not self._buffer:
                    return b""
                raise BadArchive("it ends early")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self.position += size
        return data

    def skip(self, size: int) -> None:
        """Pass over bytes without holding them."""
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
        """Return some bytes more; empty at the end."""
        while not self._ended:
            unpack = self._unpack
            if unpack is None:
                data, self._packed = self._packed or self._file.read(_READ_BYTES), b""
                return data
            if unpack.eof:
                # Streams may follow each other; what else follows is padding.
                self._packed = unpack.unused_data or self._file.read(_READ_BYTES)
                self._unpack = self._opened()
                self._ended = self._unpack is None
                continue
            is_hungry = unpack.needs_input if isinstance(unpack, lzma.LZMADecompressor) else True
            if not self._packed and is_hungry:
                self._packed = self._file.read(_READ_BYTES)
                if not self._packed:
                    raise BadArchive("it ends early")
            if isinstance(unpack, lzma.LZMADecompressor):
                given, self._packed = (self._packed, b"") if is_hungry else (b"", self._packed)
                data = unpack.decompress(given, _READ_BYTES)
            else:
                data = unpack.decompress(self._packed, _READ_BYTES)
                self._packed = unpack.unconsumed_tail
            if data:
                return data
        return b""
