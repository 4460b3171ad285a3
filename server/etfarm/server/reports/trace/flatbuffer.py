"""Many tables of a FlatBuffer at once, a field a column, in numpy arrays; `etfarm.wire.flatbuffer` reads single tables.

An ETDump has an event for each operator of each iteration, and code that flatc generates for Python takes as long for each of
them as a column here takes for thousands.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
"""[n] positions in the bytes; 0 stands for what a table does not have."""


class Columns:
    """The bytes of a FlatBuffer. What points outside of them raises IndexError."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def numbers(self, places: Positions, form: str) -> NDArray[Any]:
        """Return the numbers of a numpy type that lie at `places`, aligned or not."""
        kind = np.dtype(form)
        count = max(0, len(self._data) - kind.itemsize + 1)
        if places.size and places.min() < 0:
            raise IndexError("a table lies before the bytes")
        return np.ndarray((count,), kind, self._data, strides=(1,))[places]

    def targets(self, places: Positions) -> Positions:
        """Return where the offsets at `places` lead; 0 for 0."""
        found = places + self.numbers(places, "<u4")
        return np.where(places > 0, found, 0)

    def fields(self, tables: Positions, slot: int) -> Positions:
        """Return where each table has a field; 0 where it does not have it, and for tables that are 0 themselves."""
        layouts = np.where(tables > 0, tables - self.numbers(tables, "<i4"), 0)
        offset = 4 + 2 * slot
        has = (tables > 0) & (self.numbers(layouts, "<u2") > offset)
        found = np.zeros_like(tables)
        found[has] = self.numbers(layouts[has] + offset, "<u2")
        return np.where(found > 0, tables + found, 0)

    def scalars(self, tables: Positions, slot: int, form: str, default: int) -> NDArray[Any]:
        """Return a scalar of each table, `default` where it does not have it."""
        places = self.fields(tables, slot)
        return np.where(places > 0, self.numbers(places, form), np.dtype(form).type(default))

    def vectors(self, tables: Positions, slot: int, width: int) -> tuple[Positions, NDArray[np.int64]]:
        """Return where the vector (or string) of each table begins, and its number of elements of `width` bytes; 0 and 0 for a
        table without it."""
        places = self.targets(self.fields(tables, slot))
        lengths = np.where(places > 0, self.numbers(places, "<u4").astype(np.int64), 0)
        if (places + 4 + width * lengths > len(self._data)).any():
            raise IndexError("a vector ends behind the bytes")
        return np.where(places > 0, places + 4, 0), lengths
