"""The members of a .pt2 or a torch.save file: zips in which all readers see the same contents. Stdlib only.

An archive in which Python's zipfile and torch's own reader could see different members, names, or bytes is refused. The child
screens again what torch's reader returns.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from etfarm.server.compile.screening.errors import NotAPt2, UnsafeModel

MAX_MEMBERS: Final = 100_000
MAX_DIRECTORY_BYTES: Final = 32 << 20
MAX_BYTES: Final = 64 << 30
"""Maximum total of the members' unpacked sizes."""
MAX_NAME: Final = 500
"""Maximum length of a member's name. Names of parameters do not count, because their payloads are named like weight_0."""

_ONLY_STORED: Final = zipfile.ZIP_STORED
_LOCAL_HEADER_BYTES: Final = 30


@dataclass(frozen=True)
class Records:
    """An archive's members, without its root folder, and a function that reads them."""

    names: tuple[str, ...]
    read: Callable[[str], bytes]
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Maximum sizes of what `read` returns, by name; empty if the reader does not provide them."""


Opened = Callable[[str, bytes], Records]
"""Function that returns the members of a torch.save file for its name and bytes."""


@contextmanager
def pt2_records(path: Path) -> Iterator[Records]:
    """Yield the members of a .pt2 file, which stays open inside the context.

    Raises:
        NotAPt2: the file is not a zip, or is cut off.
        UnsafeModel: two readers could see different members, or the file is too large.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_ends(file.read(4), _read_tail(file, size, _END_BYTES))
        try:
            _check_directory(file, size)
            with zipfile.ZipFile(file) as archive:
                yield _records(archive, size)
        except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, UnicodeDecodeError) as error:
            raise NotAPt2(f"its zip directory cannot be read ({_escape(str(error))})") from None


def tensor_records(name: str, data: bytes) -> Records:
    """Return the members of a torch.save file, a zip with one pickle of plain tensors.

    Raises:
        UnsafeModel: the bytes are not such a zip, so that torch.load would fall back to unpickling them.
    """
    _check_ends(data[:4], data[-_END_BYTES:], name)
    try:
        _check_directory(io.BytesIO(data), len(data))
        # The archive stays open as long as its reader exists.
        return _records(zipfile.ZipFile(io.BytesIO(data)), len(data))
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, UnicodeDecodeError, NotAPt2):
        raise UnsafeModel("NOT_WEIGHTS_ONLY", name, "is not a torch.save file, so it would be unpickled") from None


def _records(archive: zipfile.ZipFile, size: int) -> Records:
    """Return the members of a zip that all readers see equally: one root, unique names, no compression, no leading bytes."""
    members = archive.infolist()
    if not members:
        raise NotAPt2("it is an empty zip")
    _check_places(members, size)
    if any(member.filename == "serialized_exported_program.json" for member in members):
        raise NotAPt2(
            "it was written by a torch before 2.8, or is an edge-dialect program of executorch.exir.serde; an "
            "ATen-dialect program is required"
        )
    root = members[0].filename.partition("/")[0] + "/"
    seen: set[str] = set()
    sizes: dict[str, int] = {}
    total = 0
    for member in members:
        name = member.filename
        inner = name.removeprefix(root)
        if len(name) > MAX_NAME or not name.isprintable() or member.orig_filename != name:
            raise UnsafeModel("AMBIGUOUS_ZIP", _escape(name), "is not a valid member name")
        if not name.startswith(root) or not inner or ".." in inner.split("/") or "\\" in name or "\0" in name:
            raise UnsafeModel("AMBIGUOUS_ZIP", _escape(name), f"is not in {_escape(root)}")
        if inner.lower() in seen:
            raise UnsafeModel("AMBIGUOUS_ZIP", _escape(name), "occurs twice")
        if member.compress_type != _ONLY_STORED or member.file_size != member.compress_size:
            raise UnsafeModel("AMBIGUOUS_ZIP", _escape(name), "is compressed, which torch never does")
        if member.flag_bits & 0x1:
            raise UnsafeModel("AMBIGUOUS_ZIP", _escape(name), "is encrypted")
        total += member.file_size
        if total > min(MAX_BYTES, size):
            raise UnsafeModel("TOO_LARGE", _escape(name), "claims to be larger than the file")
        seen.add(inner.lower())
        sizes[inner] = member.file_size

    def read(inner: str) -> bytes:
        with archive.open(root + inner) as member:
            return member.read(sizes[inner])

    return Records(tuple(sizes), read, sizes)


def _check_places(members: list[zipfile.ZipInfo], size: int) -> None:
    """Require that the members follow each other from the first byte on, without shared bytes and without leading bytes.

    Raises:
        UnsafeModel: they do not.
    """
    ordered = sorted(members, key=lambda member: member.header_offset)
    if ordered[0].header_offset != 0:
        raise UnsafeModel("AMBIGUOUS_ZIP", "its first byte", "is not its first member's")
    ends = [member.header_offset for member in ordered[1:]] + [size]
    for member, end in zip(ordered, ends, strict=True):
        if member.header_offset + _LOCAL_HEADER_BYTES + member.compress_size > size:
            raise UnsafeModel("TOO_LARGE", _escape(member.filename), "claims to be larger than the file")
        if member.header_offset + _LOCAL_HEADER_BYTES + member.compress_size > end:
            raise UnsafeModel("AMBIGUOUS_ZIP", _escape(member.filename), "shares bytes with another member")


def _escape(text: str) -> str:
    """Return a text of the archive for a message, without control characters."""
    return ascii(text[:100])[1:-1]


def _read_tail(file: BinaryIO, size: int, count: int) -> bytes:
    """Return the last `count` bytes, or all if there are fewer, and rewind the file."""
    file.seek(max(0, size - count))
    tail = file.read(count)
    file.seek(0)
    return tail


_END_BYTES: Final = 22
_LOCATOR_BYTES: Final = 20
_END64_BYTES: Final = 56


def _check_directory(file: BinaryIO, size: int) -> None:
    """Limit the objects that zipfile creates: it uses the directory's size, and not its count, from the archive's end.

    Source: APPNOTE.TXT, 4.3.14 to 4.3.16.

    Raises:
        NotAPt2: the directory does not lie right before the end records.
        UnsafeModel: it is too large.
    """
    ends = _read_tail(file, size, _END64_BYTES + _LOCATOR_BYTES + _END_BYTES)
    length, start = struct.unpack("<2I", ends[-10:-2])
    end = size - _END_BYTES
    if ends[:-_END_BYTES][-_LOCATOR_BYTES:][:4] == b"PK\x06\x07":
        if ends[:4] != b"PK\x06\x06":
            raise NotAPt2("its zip directory cannot be found")
        length, start = struct.unpack("<2Q", ends[40:56])
        end = size - len(ends)
        # torch's reader follows the locator; Python's reader uses the record right before it.
        if struct.unpack("<Q", ends[64:72])[0] != end:
            raise UnsafeModel("AMBIGUOUS_ZIP", "its zip64 locator", "does not point at the record before it")
    if start + length != end:
        raise NotAPt2("its zip directory cannot be found")
    if length > MAX_DIRECTORY_BYTES:
        raise UnsafeModel("TOO_LARGE", "its directory", f"has {length} bytes")
    file.seek(start)
    count = file.read(length).count(b"PK\x01\x02")
    file.seek(0)
    if count > MAX_MEMBERS:
        raise UnsafeModel("TOO_LARGE", "its directory", f"has {count} members")


def _check_ends(head: bytes, tail: bytes, where: str = "") -> None:
    """Require that a zip begins with its first member and ends with its end record, so that all readers find one directory."""
    if head == b"PK\x03\x04" and tail[:4] == b"PK\x05\x06" and tail[-2:] == b"\0\0":
        return
    if where:
        raise UnsafeModel("NOT_WEIGHTS_ONLY", where, "is not a torch.save file, so it would be unpickled")
    raise NotAPt2("it is not a zip file, or is cut off")
