"""Positions of iterators such as `itertools.count()`, which a call moves on and which are put back by a copy."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field
from typing import Any, Final

_COPIED: Final = frozenset(
    {
        itertools.chain,
        itertools.count,
        itertools.cycle,
        itertools.islice,
        itertools.repeat,
        type(iter(())),
        type(iter([])),
        type(iter(range(0))),
    }
)
"""Types that say by `__reduce__` where they stand. Those of itertools no longer do from Python 3.14 on."""
_MAX_ELEMENTS: Final = 10_000
"""Length of a list that is compared."""


@dataclass(frozen=True)
class Position:
    """An iterator as it was at some time."""

    state: Any
    """Where it stood, in tuples. Its elements are compared by identity."""
    _copy: Any = field(repr=False)

    def iterator(self) -> Any:
        """Return a new iterator that stands there."""
        return _copied(self._copy)


def frozen(value: Any) -> Any:
    """Return the position of an iterator in place of it; other values, and iterators that cannot be copied, as they are."""
    if type(value) not in _COPIED:
        return value
    with warnings.catch_warnings():  # Python 3.12 deprecates copies of itertools
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            copy = _copied(value)
            return Position(_state_of(copy), copy)
        except Exception:  # noqa: BLE001 - such as over a generator, an iterator of the user, or with a newer Python
            return value


def thawed(value: Any) -> Any:
    """Return an iterator for a position; other values as they are."""
    return value.iterator() if isinstance(value, Position) else value


def _copied(value: Any) -> Any:
    """Return a copy of an iterator and of the iterators below it, with the same elements.

    copy.copy shares the iterators below, and the list in which a cycle collects its elements.
    """
    function, args, *state = value.__reduce__()
    copy = function(*map(_part, args))
    if state and state[0] is not None:
        copy.__setstate__(_part_of_state(state[0]))
    return copy


def _part(value: Any) -> Any:
    if hasattr(type(value), "__next__"):
        return _copied(value)
    return tuple(map(_part, value)) if type(value) is tuple else value


def _part_of_state(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_part_of_state, value))
    return list(value) if type(value) is list else _part(value)


def _state_of(value: Any) -> Any:
    if hasattr(type(value), "__next__"):
        return (type(value), *map(_state_of, value.__reduce__()))
    if isinstance(value, range):
        return (value.start, value.stop, value.step)
    if not isinstance(value, tuple | list):
        return value
    if len(value) > _MAX_ELEMENTS:
        raise ValueError(len(value))
    return tuple(map(_state_of, value))
