"""A columnar FlatBuffer reader that decodes many tables at once into numpy arrays, one column per field.

An ETDump has an event for each operator of each iteration. The Python code that flatc generates takes as long for one event as
a column here takes for thousands. `etfarm.wire.flatbuffer` reads single tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
"""Positions in the bytes, [n]; 0 stands for a field that the table does not have."""


class Columns:
    """The bytes of a FlatBuffer; an offset that points outside of them raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def numbers(self, places: Positions, form: str) -> NDArray[Any]:
        """Return the numbers of the numpy type `form` at `places`, aligned or not."""
        kind = np.dtype(form)
        count = max(0, len(self._data) - kind.itemsize + 1)
        if places.size and places.min() < 0:
            raise IndexError("a table lies before the bytes")
        return np.ndarray((count,), kind, self._data, strides=(1,))[places]

    def targets(self, places: Positions) -> Positions:
        """Return the positions that the offsets at `places` refer to; 0 for 0."""
        targets = places + self.numbers(places, "<u4")
        return np.where(places > 0, targets, 0)

    def fields(self, tables: Positions, slot: int) -> Positions:
        """Return the position of a field in each table; 0 if the table lacks it, and for tables that are 0."""
        layouts = np.where(tables > 0, tables - self.numbers(tables, "<i4"), 0)
        offset = 4 + 2 * slot
        has = (tables > 0) & (self.numbers(layouts, "<u2") > offset)
        offsets = np.zeros_like(tables)
        offsets[has] = self.numbers(layouts[has] + offset, "<u2")
        return np.where(offsets > 0, tables + offsets, 0)

    def scalars(self, tables: Positions, slot: int, form: str, default: int) -> NDArray[Any]:
        """Return a scalar field of each table; `default` for tables without it."""
        places = self.fields(tables, slot)
        return np.where(places > 0, self.numbers(places, form), np.dtype(form).type(default))

    def vectors(self, tables: Positions, slot: int, width: int) -> tuple[Positions, NDArray[np.int64]]:
        """Return the start of each table's vector (or string) and its number of elements of `width` bytes.

        Both are 0 for a table without it.
        """
        places = self.targets(self.fields(tables, slot))
        lengths = np.where(places > 0, self.numbers(places, "<u4").astype(np.int64), 0)
        if (places + 4 + width * lengths > len(self._data)).any():
            raise IndexError("a vector ends behind the bytes")
        return np.where(places > 0, places + 4, 0), lengths
