"""The files that a request names, which are the only stored files that a child may read.

The bytes of a request name its files by their indices, so that the request is valid wherever the files are.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from etfarm.server.workers.jail.file_view import MAX_READABLE
from etfarm.wire.errors import error_for


def files_of(request: object) -> list[Path]:
    """Return every Path in a request, at any depth of dataclasses, mappings, lists, tuples and sets, once.

    Raises:
        TOO_MANY_FILES: there are more files than can be mounted for a child.
    """
    files = list(dict.fromkeys(_paths(request)))
    if len(files) > MAX_READABLE:
        raise error_for(
            "TOO_MANY_FILES",
            f"A job may use at most {MAX_READABLE} files at a time, got {len(files)}.",
            "Use fewer calibration inputs.",
            files=len(files),
        )
    return files


def encode(request: object, files: Sequence[Path]) -> bytes:
    """Return a request's bytes for `decode`.

    Args:
        files: from `files_of`.
    """
    indices = {path: index for index, path in enumerate(files)}
    data = io.BytesIO()
    _Encoder(data, indices).dump(request)
    return data.getvalue()


def decode(data: bytes, files: Sequence[Path]) -> object:
    """Return the request of `encode`, which only the daemon may have called.

    Args:
        files: where the request's files are for the caller, in the order of `files_of`.
    """
    return _Decoder(io.BytesIO(data), files).load()


class _Encoder(pickle.Pickler):
    def __init__(self, data: io.BytesIO, indices: Mapping[Path, int]) -> None:
        super().__init__(data)
        self._indices = indices

    def persistent_id(self, value: object) -> int | None:
        return self._indices.get(value) if isinstance(value, Path) else None


class _Decoder(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, files: Sequence[Path]) -> None:
        super().__init__(data)
        self._files = files

    def persistent_load(self, index: object) -> Path:
        assert isinstance(index, int)
        return self._files[index]


def _paths(value: object) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _paths(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _paths(getattr(value, field.name))
