"""The lines that others than the log write to stderr, such as those of gRPC, as JSON."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final, TextIO

_STDERR: Final = 2
_MOST: Final = 64 << 10
"""Bytes after which a line is split."""
_GLOG: Final = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ (\S+:\d+)\] (.*)")
"""A line of gRPC's log: `E0000 00:00:1732000000.123456 4242 ssl_transport_security.cc:1654] Handshake failed ...`."""
_LEVELS: Final = {"I": "info", "W": "warning", "E": "error", "F": "critical"}

_original: int | None = None
"""The real stderr while a pipe has its place."""


@contextmanager
def as_json() -> Iterator[TextIO]:
    """Write all that is printed to stderr as JSON objects, one a line, and yield the stream of a log that is JSON already."""
    global _original
    sys.stderr.flush()
    _original = os.dup(_STDERR)
    read, write = os.pipe()
    os.dup2(write, _STDERR)
    os.close(write)
    thread = threading.Thread(target=_copy, args=(read, _original), name="stderr", daemon=True)
    thread.start()
    try:
        yield os.fdopen(os.dup(_original), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    finally:
        sys.stderr.flush()
        restore()
        # Child processes that do not end may have the pipe.
        thread.join(1.0)
        if not thread.is_alive():
            os.close(_original)
        _original = None


def restore() -> None:
    """Give the process its stderr back, as before another program takes its place."""
    if _original is not None:
        os.dup2(_original, _STDERR)


def line_of(text: str) -> str:
    """Return the JSON of a line as gRPC or anything else prints it."""
    event = {"message": text, "level": "warning"}
    if (known := _GLOG.match(text)) is not None:
        event = {"message": known[3], "level": _LEVELS[known[1]], "logger": "grpc", "source": known[2]}
    return json.dumps(event | {"timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z")})


def _copy(read: int, to: int) -> None:
    left = b""
    while chunk := os.read(read, _MOST):
        *lines, left = (left + chunk).split(b"\n")
        if len(left) >= _MOST:
            lines, left = [*lines, left], b""
        _write(to, lines)
    _write(to, [left])
    os.close(read)


def _write(to: int, lines: list[bytes]) -> None:
    texts = [line.decode(errors="replace").rstrip() for line in lines]
    data = "".join(f"{line_of(text)}\n" for text in texts if text).encode()
    try:
        while data:
            try:
                data = data[os.write(to, data) :]
            except BlockingIOError:
                select.select([], [to], [])
    except OSError:  # on a full disk, or without a reader: a pipe that nobody empties would stop every thread that prints
        return
