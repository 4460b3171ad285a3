"""Reading FlatBuffers without generated code: ExecuTorch's files are few tables of few fields.

Whatever is outside of the buffer raises `BadBuffer`; nothing is read that a damaged offset could make endless.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final

_SIZES: Final = {"b": 1, "B": 1, "?": 1, "h": 2, "H": 2, "i": 4, "I": 4, "q": 8, "Q": 8, "d": 8}
Buffer = bytes | memoryview


_TIMES: Final = 8
"""How many times the buffer's bytes may be read in total: writers share equal parts."""
_LEAST: Final = 1 << 16
_TABLE_BYTES: Final = 8
"""Size of the smallest table: the offset that leads to it, and its own."""


class BadBuffer(ValueError):
    """An offset leads out of the buffer, or its vectors hold more than its bytes."""


class Budget:
    """The number of bytes that may still be read of a buffer, in which vectors of vectors may all lead to the same table."""

    def __init__(self, size: int) -> None:
        self._left = _TIMES * size + _LEAST

    def take(self, size: int) -> None:
        """Count bytes that are read.

        Raises:
            BadBuffer: the total exceeds a multiple of the buffer's size.
        """
        self._left -= size
        if self._left < 0:
            raise BadBuffer("its vectors hold more than its bytes")


@dataclass(frozen=True)
class Table:
    """A table at `position` of `buffer`. Fields are numbered as the schema lists them; a union counts for two."""

    buffer: Buffer
    position: int
    budget: Budget = field(compare=False, repr=False)

    @classmethod
    def root(cls, buffer: Buffer) -> Table:
        """The table that the whole buffer is about."""
        return cls(buffer, _read(buffer, 0, "I"), Budget(len(buffer)))

    def number(self, field: int, kind: str) -> int:
        """An integer or a bool of `struct` kind; 0 where it is absent."""
        position = self._field(field)
        return 0 if position is None else int(_read(self.buffer, position, kind))

    def real(self, field: int) -> float:
        """A double; 0 where it is absent."""
        position = self._field(field)
        return 0.0 if position is None else float(_read(self.buffer, position, "d"))

    def table(self, field: int) -> Table | None:
        """A table, or None."""
        position = self._target(field)
        return None if position is None else Table(self.buffer, position, self.budget)

    def text(self, field: int) -> str:
        """A string, with U+FFFD for what is no UTF-8; empty where it is absent."""
        data = self.data(field)
        self.budget.take(len(data))
        return bytes(data).decode("utf-8", "replace")

    def data(self, field: int) -> Buffer:
        """A vector of bytes; empty where it is absent."""
        start, count = self._vector(field, 1)
        return self.buffer[start : start + count]

    def numbers(self, field: int, kind: str) -> list[int]:
        """A vector of integers; empty where it is absent."""
        start, count = self._vector(field, _SIZES[kind])
        self.budget.take(count * _SIZES[kind])
        return list(struct.unpack_from(f"<{count}{kind}", self.buffer, start))

    def tables(self, field: int) -> list[Table]:
        """A vector of tables; empty where it is absent."""
        start, count = self._vector(field, 4)
        self.budget.take(count * _TABLE_BYTES)
        places = range(start, start + 4 * count, 4)
        return [Table(self.buffer, place + _read(self.buffer, place, "I"), self.budget) for place in places]

    def _field(self, field: int) -> int | None:
        vtable = self.position - _read(self.buffer, self.position, "i")
        if 6 + 2 * field > _read(self.buffer, vtable, "H"):
            return None
        offset = _read(self.buffer, vtable + 4 + 2 * field, "H")
        return self.position + offset if offset else None

    def _target(self, field: int) -> int | None:
        position = self._field(field)
        return None if position is None else position + int(_read(self.buffer, position, "I"))

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        position = self._target(field)
        if position is None:
            return 0, 0
        count = _read(self.buffer, position, "I")
        if position + 4 + count * item_bytes > len(self.buffer):
            raise BadBuffer(f"a vector of {count} leaves the buffer")
        return position + 4, count


def _read(buffer: Buffer, position: int, kind: str) -> Any:
    if not 0 <= position <= len(buffer) - _SIZES[kind]:
        raise BadBuffer(f"offset {position} is outside of the buffer")
    return struct.unpack_from(f"<{kind}", buffer, position)[0]
