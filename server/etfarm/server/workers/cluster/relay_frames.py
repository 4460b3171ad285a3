"""The bytes between the connector and a node's actor: what a child wrote, in pieces, and answers that may be errors.

What a node sends is validated here, since it may be anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final

from etfarm.server.workers import errors
from etfarm.server.workers.errors import BadAnswer
from etfarm.wire import digest as digests
from etfarm.wire.errors import EtfarmError

CHANNEL: Final = b"c"
LOG: Final = b"l"
STATUS: Final = b"s"
"""Kinds of a child's bytes, by the end that they were read from."""
END: Final = b"z"
"""Kind of the last piece: JSON of the child's files, `[[name, size, digest], ...]`."""

PIECE_BYTES: Final = 4 << 20
"""Size of the pieces in which files are sent."""

MAX_FILES: Final = 10_000
"""Maximum number of files of a child that are sent to the server."""

_KINDS: Final = frozenset({CHANNEL, LOG, STATUS, END})
_MAX_ANSWER_BYTES: Final = 32 << 20
"""Maximum size of an answer: a piece, and the list of all files."""
_MAX_PIECES: Final = 256
"""Maximum number of pieces in an answer; a node queues fewer."""
_MAX_REPORT_BYTES: Final = 4096
_MAX_NAME_BYTES: Final = 255

_HEADER: Final = struct.Struct("<cI")
_DONE: Final = b"+"
_FAILED: Final = b"-"


def join(pieces: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return pieces (kind, data) as bytes."""
    return b"".join(_HEADER.pack(kind, len(data)) + data for kind, data in pieces)


def split(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the pieces that `join` was given.

    Raises:
        BadAnswer: the data is truncated, or has too many pieces or a kind that there is not.
    """
    place = pieces = 0
    while place < len(data):
        if (pieces := pieces + 1) > _MAX_PIECES:
            raise BadAnswer(f"A compile node sent more than {_MAX_PIECES} pieces at a time.")
        if len(data) - place < _HEADER.size:
            raise BadAnswer("A compile node sent a truncated piece.")
        kind, size = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        if len(data) - place < size:
            raise BadAnswer("A compile node sent a truncated piece.")
        if kind not in _KINDS:
            raise BadAnswer(f"A compile node sent a piece of kind {kind!r}.")
        yield kind, data[place : place + size]
        place += size


def encode_result(data: bytes) -> bytes:
    """Return the answer of a call that succeeded."""
    return _DONE + data


def encode_error(error: EtfarmError) -> bytes:
    """Return the answer of a call that raised an error."""
    return _FAILED + errors.to_json(error)


def decode_answer(answer: object) -> bytes:
    """Return the result in an answer.

    Raises:
        EtfarmError: the answer is an error.
        BadAnswer: it is anything but bytes, or too large.
    """
    if not isinstance(answer, bytes):
        raise BadAnswer(f"A compile node answered with {type(answer).__name__[:50]} instead of bytes.")
    if len(answer) > _MAX_ANSWER_BYTES:
        raise BadAnswer(f"A compile node answered with {len(answer):,} bytes, above {_MAX_ANSWER_BYTES:,}.")
    if answer[:1] == _FAILED:
        raise errors.from_json(answer[1:])
    return answer[1:]


def decode_missing(data: bytes) -> set[str]:
    """Return the digests of the files that a node lacks.

    Raises:
        BadAnswer: the data is no list of texts.
    """
    missing = _decode(data)
    if not isinstance(missing, list) or not all(isinstance(digest, str) for digest in missing):
        raise BadAnswer("A compile node did not list the files that it lacks.")
    return set(missing)


def decode_files(data: bytes, *, most_bytes: int) -> list[tuple[str, int, str]]:
    """Return the name, size and digest of each file that a child left, from the last piece.

    Args:
        most_bytes: maximum size of a child's file.

    Raises:
        BadAnswer: no child can leave such files in its folder.
    """
    rows = _decode(data)
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise BadAnswer(f"A compile node did not list at most {MAX_FILES:,} files of a child.")
    files = dict[str, tuple[str, int, str]]()
    for row in rows:
        match row:
            case [str(name), int(size), str(digest)] if (
                _is_file_name(name) and name not in files and 0 <= size <= most_bytes and digests.is_digest(digest)
            ):
                files[name] = name, int(size), digest
            case _:
                raise BadAnswer(f"A compile node lists a file that no child can leave: {repr(row)[:200]}.")
    return list(files.values())


def _is_file_name(name: str) -> bool:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(encoded) <= _MAX_NAME_BYTES and name not in (".", "..") and not {"/", "\0"} & set(name)


def require_report(data: bytes) -> None:
    """Require the report of a child's supervisor, which is empty if that was killed.

    Raises:
        BadAnswer: no supervisor reports that.
    """
    if not data:
        return
    match _decode(data) if len(data) <= _MAX_REPORT_BYTES else None:
        case {
            "exit": int(), "peak_rss_bytes": int(peak), "cpu_s": float() | int() as cpu_s,
            "out_of_memory": bool(), "too_many_processes": bool(), "disk_full": bool(), **others,
        } if not others and 0 <= peak < 1 << 60 and 0 <= cpu_s < 1e12:  # fmt: skip
            return
    raise BadAnswer("A compile node reported an end that no child has.")


def _decode(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadAnswer("A compile node sent something other than JSON.") from None
