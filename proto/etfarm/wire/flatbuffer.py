"""A reader of FlatBuffer tables that checks every offset before following it.

Programs, XNNPACK graphs, weights and ETDumps come from users and devices. The Python code that flatc generates checks no bounds,
and ExecuTorch's copy of it imports torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

Buffer = bytes | memoryview

_TABLE_BYTES: Final = 8
"""Size of the smallest table in bytes: the offset that refers to it, and its own."""
_MAX_READS: Final = 8
"""Maximum number of times that the buffer's bytes may be read in total; writers share equal parts."""
_MIN_BUDGET: Final = 1 << 16


class BadBuffer(ValueError):
    """A buffer with an offset that leads out of it, or with vectors that exceed its bytes."""


class Table:
    """A table at `position` of a buffer. Fields are numbered as the schema lists them; a union takes two, its type and its table.

    Reading several times more tables, numbers and texts from one root than the buffer could hold raises `BadBuffer`, since all
    elements of nested vectors may refer to the same table.

    Raises:
        BadBuffer: the table is outside of the buffer; all methods raise it likewise.
    """

    __slots__ = ("_budget", "_buffer", "_layout", "_layout_bytes", "_position")

    def __init__(self, buffer: Buffer, position: int, budget: list[int] | None = None) -> None:
        self._buffer = buffer
        self._position = position
        self._budget = [_MAX_READS * len(buffer) + _MIN_BUDGET] if budget is None else budget
        self._layout = position - int(_read(buffer, position, "<i"))
        self._layout_bytes = int(_read(buffer, self._layout, "<H"))

    @classmethod
    def root(cls, buffer: Buffer, position: int = 0) -> Table:
        """Return the table that the offset at `position` refers to."""
        return cls(buffer, position + int(_read(buffer, position, "<I")))

    def number(self, field: int, form: str = "<I") -> int:
        """Return an integer or bool field in a `struct` format; 0 if the table lacks it."""
        position = self._field(field)
        return 0 if position is None else int(_read(self._buffer, position, form))

    def real(self, field: int) -> float:
        """Return a double field; 0 if the table lacks it."""
        position = self._field(field)
        return 0.0 if position is None else float(_read(self._buffer, position, "<d"))

    def table(self, field: int) -> Table | None:
        """Return a table field; None if this table lacks it."""
        position = self._target(field)
        return None if position is None else Table(self._buffer, position, self._budget)

    def tables(self, field: int) -> Iterator[Table]:
        """Yield the tables of a vector; empty if this table lacks it."""
        positions = self.positions(field)
        self._take(_TABLE_BYTES * len(positions))
        for position in positions:
            yield Table(self._buffer, position + int(_read(self._buffer, position, "<I")), self._budget)

    def numbers(self, field: int, form: str = "<I") -> tuple[int, ...]:
        """Return a vector of integers in a `struct` format; empty if the table lacks it."""
        width = struct.calcsize(form)
        positions = self.positions(field, width)
        self._take(width * len(positions))
        return struct.unpack_from(f"<{len(positions)}{form[1:]}", self._buffer, positions.start)

    def positions(self, field: int, width: int = 4) -> range:
        """Return the positions of a vector's elements, each of `width` bytes; empty if the table lacks it."""
        start = self._target(field)
        if start is None:
            return range(0)
        start += 4
        end = start + width * int(_read(self._buffer, start - 4, "<I"))
        if end > len(self._buffer):
            raise BadBuffer("a vector ends behind the bytes")
        return range(start, end, width)

    def content(self, field: int) -> memoryview:
        """Return a vector of bytes, or the bytes of a string; empty if the table lacks it."""
        positions = self.positions(field, 1)
        return memoryview(self._buffer)[positions.start : positions.stop]

    def text(self, field: int) -> str:
        """Return a string, with U+FFFD for bytes that are not UTF-8; empty if the table lacks it."""
        content = self.content(field)
        self._take(len(content))
        return str(content, "utf-8", "replace")

    def _take(self, size: int) -> None:
        self._budget[0] -= size
        if self._budget[0] < 0:
            raise BadBuffer("its vectors hold more than its bytes")

    def _field(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._layout_bytes:
            return None
        offset = int(_read(self._buffer, self._layout + slot, "<H"))
        return self._position + offset if offset else None

    def _target(self, field: int) -> int | None:
        position = self._field(field)
        return None if position is None else position + int(_read(self._buffer, position, "<I"))


def _read(buffer: Buffer, position: int, form: str) -> Any:
    # struct interprets a negative offset as relative to the end.
    if position < 0:
        raise BadBuffer("a table lies before the bytes")
    try:
        return struct.unpack_from(form, buffer, position)[0]
    except struct.error:
        raise BadBuffer(f"offset {position} is outside of {len(buffer)} bytes") from None
