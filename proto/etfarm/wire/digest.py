"""Digests (lower-case hex sha256) of bytes, files and manifests, which identify everything that is stored."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def is_digest(text: str) -> bool:
    """Return whether `text` is a lower-case hex sha256."""
    return _DIGEST.match(text) is not None


def of_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the sha256 of `data`, lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, lower-case hex. Blocking: call it in a thread from async code."""
    return hash_of(path).hexdigest()


def hash_of(path: Path) -> hashlib._Hash:
    """Return the hash of a file's bytes, to which more may be added. Blocking, as `of_file`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256")


def canonical_json(value: object) -> str:
    """Return the canonical JSON of a value, over which its digest is taken: sorted keys, no blanks, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def of_value(value: object) -> str:
    """Return the sha256 of `canonical_json(value)`."""
    return of_bytes(canonical_json(value).encode())


def of_program(pte: str, data: Mapping[str, str]) -> str:
    """Return the digest of a Program, over a manifest with the digests of its .pte and its named data files."""
    return of_value({"schema": "etfarm.program/1", "pte": pte, "data": dict(data)})
