"""Digests: lower-case hex sha256 of bytes, files and manifests. Identity of everything that is stored."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


def is_digest(text: str) -> bool:
    """Whether `text` is a lower-case hex sha256."""
    return _DIGEST.match(text) is not None


def of_bytes(data: bytes | bytearray | memoryview) -> str:
    """sha256 of `data`, lower-case hex."""
    return hashlib.sha256(data).hexdigest()


def of_file(path: Path) -> str:
    """sha256 of a file's bytes, lower-case hex. Blocks: call it in a thread from async code."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: object) -> str:
    """One text for equal values: sorted keys, no blanks, no NaN. What digests of values are taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def of_value(value: object) -> str:
    """sha256 of `canonical_json(value)`."""
    return of_bytes(canonical_json(value).encode())


def of_program(pte: str, data: Mapping[str, str]) -> str:
    """A Program's digest: over the manifest of its .pte and its named data files, each by digest."""
    return of_value({"schema": "etfarm.program/1", "pte": pte, "data": dict(data)})
