"""The files that a request names, which are the only stored files that a child may read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from etfarm.server.workers.jail.file_view import MAX_READABLE
from etfarm.wire.errors import Kind, UserError


class TooManyFiles(UserError):
    """A job needs more files at a time than can be mounted for a child."""

    reason = "TOO_MANY_FILES"
    kind = Kind.RESOURCE_EXHAUSTED

    def __init__(self, count: int) -> None:
        super().__init__(
            f"A job may use at most {MAX_READABLE} files at a time, got {count}.", "Use fewer calibration inputs.", files=count
        )


def files_of(request: object) -> list[Path]:
    """Return every Path in a request, at any depth of dataclasses, mappings, lists, tuples and sets, once.

    Raises:
        TooManyFiles: there are more files than can be mounted for a child.
    """
    files = list(dict.fromkeys(_paths(request)))
    if len(files) > MAX_READABLE:
        raise TooManyFiles(len(files))
    return files


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
