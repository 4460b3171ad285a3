"""`Samples`, the latencies of a timed pass: up to a million integers at eight bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

_SHOWN = 6


class Samples(Sequence[int]):
    """An immutable sequence of int64 values in nanoseconds, in the order measured.

    It equals every sequence with the same values, such as a list. `numpy.asarray` makes an array of it without a copy.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[int] = ()) -> None:
        """Copy the values.

        Raises:
            TypeError: a value is not an integer.
            OverflowError: a value has more than 64 bits.
        """
        self._values = array("q", values)

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Samples: ...
    def __getitem__(self, index: int | slice) -> int | Samples:
        return Samples(self._values[index]) if isinstance(index, slice) else self._values[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Samples):
            return self._values == other._values
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(mine == value for mine, value in zip(self._values, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._values[:_SHOWN]))
        more = f", … {len(self):,} in all" if len(self) > _SHOWN else ""
        return f"Samples([{shown}{more}])"

    def tolist(self) -> list[int]:
        """Return a list of integers."""
        return self._values.tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        import numpy as np

        if not len(self):
            return np.zeros(0, np.int64 if dtype is None else dtype)
        view = np.frombuffer(self._values, np.int64)
        view.flags.writeable = False
        return np.array(view, dtype=dtype, copy=copy)

    def to_numpy(self) -> NDArray[np.int64]:
        """Return a read-only int64 array of the shape (samples,), in nanoseconds."""
        return self.__array__()

    def to_pandas(self) -> pd.Series[int]:
        """Return a pandas Series named `latency_ns`, with the number of the iteration, from 0, as its index.

        Raises:
            EXTRA_MISSING: pandas is not installed.
        """
        from etfarm.client.reports.frames import samples_series

        return samples_series(self.to_numpy())
