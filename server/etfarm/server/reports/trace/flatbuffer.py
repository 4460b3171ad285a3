"""Step 9, in the jailed child: flatbuffers by their bytes, where every offset is checked before it is followed.

Programs, XNNPACK's graphs and ETDumps come from users and devices. Code that flatc generates for Python checks no bounds, takes
as long for each of an ETDump's events as a column here takes for thousands, and ExecuTorch's copy of it imports torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TABLE_BYTES = 8
"""Of the smallest: the offset that leads to it, and its own."""
_TIMES = 8
"""How often the bytes may be read: writers share what is equal."""
_LEAST = 1 << 16

Positions = NDArray[np.int64]
"""[n] places in the bytes; 0 stands for what is not there."""


class Table:
    """One table, field by field. Slots are the fields' numbers in the schema; a union takes two, its type and its table.

    What points outside of the bytes raises struct.error or ValueError; so does reading more tables, numbers and texts by way of
    one root than its bytes could hold several times over, since vectors of vectors may all lead to the same one.
    """

    def __init__(self, data: bytes | memoryview, at: int, left: list[int] | None = None) -> None:
        self._data = data
        self._at = at
        self._left = [_TIMES * len(data) + _LEAST] if left is None else left
        (back,) = struct.unpack_from("<i", data, at)
        self._fields = at - back
        if self._fields < 0:
            raise ValueError("a table lies before the bytes")
        (self._size,) = struct.unpack_from("<H", data, self._fields)

    @classmethod
    def root(cls, data: bytes | memoryview, at: int = 0) -> Table:
        """The table that the offset at `at` leads to."""
        return cls(data, at + int(struct.unpack_from("<I", data, at)[0]))

    def number(self, slot: int, form: str = "<I") -> int:
        """A scalar; 0 where the table does not have it."""
        at = self._place(slot)
        return 0 if at is None else int(struct.unpack_from(form, self._data, at)[0])

    def table(self, slot: int) -> Table | None:
        at = self._place(slot)
        return None if at is None else Table(self._data, self._target(at), self._left)

    def tables(self, slot: int) -> Iterator[Table]:
        places = self.places(slot)
        self._take(_TABLE_BYTES * len(places))
        for at in places:
            yield Table(self._data, self._target(at), self._left)

    def numbers(self, slot: int) -> tuple[int, ...]:
        """A vector of 32-bit numbers."""
        places = self.places(slot)
        self._take(4 * len(places))
        return tuple(struct.unpack_from("<I", self._data, at)[0] for at in places)

    def places(self, slot: int, width: int = 4) -> range:
        """Where the elements of a vector lie, each of `width` bytes; none where the table does not have it."""
        at = self._place(slot)
        if at is None:
            return range(0)
        start = self._target(at) + 4
        (length,) = struct.unpack_from("<I", self._data, start - 4)
        if start + width * length > len(self._data):
            raise ValueError("a vector ends behind the bytes")
        return range(start, start + width * length, width)

    def content(self, slot: int) -> memoryview:
        """A vector of bytes, or a string's."""
        places = self.places(slot, 1)
        return memoryview(self._data)[places.start : places.stop]

    def text(self, slot: int) -> str:
        """A string; "" where the table does not have it."""
        content = self.content(slot)
        self._take(len(content))
        return str(content, "utf-8")

    def _take(self, size: int) -> None:
        self._left[0] -= size
        if self._left[0] < 0:
            raise ValueError("its vectors hold more than its bytes")

    def _place(self, slot: int) -> int | None:
        offset = 4 + 2 * slot
        if offset >= self._size:
            return None
        (field,) = struct.unpack_from("<H", self._data, self._fields + offset)
        return self._at + field if field else None

    def _target(self, at: int) -> int:
        (offset,) = struct.unpack_from("<I", self._data, at)
        return at + int(offset)


class Columns:
    """Many tables of one kind at once, a field a column. What points outside of the bytes raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def numbers(self, places: Positions, form: str) -> NDArray[Any]:
        """The numbers of a numpy type that lie at `places`, aligned or not."""
        kind = np.dtype(form)
        count = max(0, len(self._data) - kind.itemsize + 1)
        if places.size and places.min() < 0:
            raise IndexError("a table lies before the bytes")
        return np.ndarray((count,), kind, self._data, strides=(1,))[places]

    def targets(self, places: Positions) -> Positions:
        """Where the offsets at `places` lead; 0 for 0."""
        found = places + self.numbers(places, "<u4")
        return np.where(places > 0, found, 0)

    def fields(self, tables: Positions, slot: int) -> Positions:
        """Where each table has a field; 0 where it does not have it, and for tables that are 0 themselves."""
        layouts = np.where(tables > 0, tables - self.numbers(tables, "<i4"), 0)
        offset = 4 + 2 * slot
        has = (tables > 0) & (self.numbers(layouts, "<u2") > offset)
        found = np.zeros_like(tables)
        found[has] = self.numbers(layouts[has] + offset, "<u2")
        return np.where(found > 0, tables + found, 0)

    def scalars(self, tables: Positions, slot: int, form: str, default: int) -> NDArray[Any]:
        """A scalar of each table, `default` where it does not have it."""
        places = self.fields(tables, slot)
        return np.where(places > 0, self.numbers(places, form), np.dtype(form).type(default))

    def vectors(self, tables: Positions, slot: int, width: int) -> tuple[Positions, NDArray[np.int64]]:
        """Where the vector (or string) of each table begins, and how many elements of `width` bytes it has; 0 and 0 where it
        has none."""
        places = self.targets(self.fields(tables, slot))
        lengths = np.where(places > 0, self.numbers(places, "<u4").astype(np.int64), 0)
        if (places + 4 + width * lengths > len(self._data)).any():
            raise IndexError("a vector ends behind the bytes")
        return np.where(places > 0, places + 4, 0), lengths
