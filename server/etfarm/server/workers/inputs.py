"""The files that a request names: a child may read these of all that the daemon stores, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

from etfarm.server.workers.view import MAX_READABLE
from etfarm.wire.errors import Kind, UserError


class TooManyFiles(UserError):
    """A job needs more files at a time than a child can be shown."""

    reason = "TOO_MANY_FILES"
    kind = Kind.RESOURCE_EXHAUSTED

    def __init__(self, count: int) -> None:
        super().__init__(
            f"The job needs {count} files at a time; {MAX_READABLE} is the most.", "Use fewer calibration inputs.", files=count
        )


def files_of(request: object) -> list[Path]:
    """Return every Path in a request, at any depth of dataclasses, mappings, lists, tuples and sets, once.

    Raises:
        TooManyFiles: they are more than a child can be shown.
    """
    found = list(dict.fromkeys(_paths(request)))
    if len(found) > MAX_READABLE:
        raise TooManyFiles(len(found))
    return found


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
