"""`JsonObject`, the base of dataclasses that are parsed from a JSON document and written back unchanged."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from etfarm.client.reports.samples import Samples

Json = dict[str, Any]


class OpenEnum(StrEnum):
    """An enum whose values a newer farm may extend: an unknown value keeps its text and equals it."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle by value: Python 3.11.2 looks a member up by its name, which unknown ones are not found by."""
        return self.__class__, (self._value_,)


class StateEnum(OpenEnum):
    """The state of something that ends."""

    @property
    def is_terminal(self) -> bool:
        """Whether the state is final."""
        return self.value in ("SUCCEEDED", "FAILED", "CANCELLED")


class _Mismatch(Exception):
    """A value with another type than its field."""

    def __init__(self, expected: str, value: object) -> None:
        self.expected = expected
        self.value = value
        self.path: list[str] = []


class _Field(NamedTuple):
    """The conversions of one field."""

    attribute: str
    key: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    is_optional: bool
    empty: Callable[[], Any] | None
    """Returns the value of a missing key; None for a key that must be present."""


def _no_keys() -> Mapping[str, Any]:
    return _NO_KEYS


_NO_KEYS: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JsonObject(Mapping[str, Any]):
    """A frozen dataclass that stands for one JSON object.

    Its fields are the object's keys in their order, with null as None; a `key` in a field's metadata is its key. As a mapping
    it is the plain JSON, so that `report["latency"]["p50_ns"]` is `report.latency.p50_ns`.

    Subclasses are declared with `eq=False, repr=False`: methods that `dataclass` writes for each of them would take a third
    of their import.
    """

    newer_keys: Mapping[str, Any] = field(default_factory=_no_keys, repr=False)
    """Plain JSON of the keys that this version does not know; `to_dict` returns them after the others."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Parse a JSON object. Missing keys become None or empty; unknown keys are kept in `newer_keys`.

        Raises:
            BadDocument: a value has another type than its field.
        """
        try:
            return cls._parse(values)
        except _Mismatch as mismatch:
            from etfarm.wire.report import BadDocument

            where = "".join(reversed(mismatch.path))
            raise BadDocument(
                f"{cls.__name__}{where} must be {mismatch.expected}, got {mismatch.value!r:.40}.",
                "Give a document that --json or `etfarm report export --format json` wrote.",
                where=f"{cls.__name__}{where}",
            ) from None

    def to_dict(self) -> Json:
        """Return the plain JSON object, with every key: enums as texts, tuples and samples as lists, None for null."""
        own = {known.key: known.write(getattr(self, known.attribute)) for known in _fields(type(self))}
        return {**own, **self.newer_keys} if self.newer_keys else own

    def json(self) -> Json:
        """Return the same as `to_dict`."""
        return self.to_dict()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(self))

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, known.attribute) for known in _fields(type(self)))))

    def __repr__(self) -> str:
        values = (f"{known.attribute}={getattr(self, known.attribute)!r}" for known in _fields(type(self)))
        return f"{type(self).__name__}({', '.join(values)})"

    def __getitem__(self, key: str) -> Any:
        for known in _fields(type(self)):
            if known.key == key:
                return known.write(getattr(self, known.attribute))
        return self.newer_keys[key]

    def __iter__(self) -> Iterator[str]:
        yield from (known.key for known in _fields(type(self)))
        yield from self.newer_keys

    def __len__(self) -> int:
        return len(_fields(type(self))) + len(self.newer_keys)

    @classmethod
    def _parse(cls, values: Any) -> Self:
        if not isinstance(values, Mapping):
            raise _Mismatch("an object", values)
        arguments = {}
        known_fields = _fields(cls)
        for known in known_fields:
            value = values.get(known.key)
            try:
                if value is not None or (known.read is _read_float and known.key in values):
                    arguments[known.attribute] = known.read(value)
                elif known.is_optional:
                    arguments[known.attribute] = None
                elif known.empty is not None:
                    arguments[known.attribute] = known.empty()
                else:
                    raise _Mismatch("present", None)
            except _Mismatch as mismatch:
                mismatch.path.append(f".{known.key}")
                raise
        keys = {known.key for known in known_fields}
        if not values.keys() <= keys:
            arguments["newer_keys"] = {key: value for key, value in values.items() if key not in keys}
        return cls(**arguments)


@functools.cache
def _fields(cls: type[JsonObject]) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    known = [each for each in fields(cls) if each.name != "newer_keys"]
    return tuple(_field(each.name, each.metadata.get("key", each.name), hints[each.name]) for each in known)


def _field(attribute: str, key: str, hint: Any) -> _Field:
    is_optional = hint is Any
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        is_optional = True
    read, write = _conversions(hint)
    if is_optional:
        inner = write
        return _Field(
            attribute,
            key,
            _read_number if hint is float else read,
            lambda value: None if value is None else inner(value),
            True,
            None,
        )
    if hint is str:
        # The JSON has null for an empty text.
        return _Field(attribute, key, read, lambda value: value or None, False, str)
    return _Field(attribute, key, read, write, False, _EMPTY.get(typing.get_origin(hint) or hint))


_EMPTY: Final[Mapping[Any, Callable[[], Any]]] = {bool: bool, int: int, float: int, tuple: tuple, Mapping: dict, Samples: Samples}
"""What a missing key stands for, by type."""


def _conversions(hint: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the functions that read and write a value of a type."""
    if hint is Any:
        return _same, _same
    if hint is Samples:
        return _read_samples, Samples.tolist
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _list_conversions(tuple, arguments[0], None if arguments[-1] is Ellipsis else len(arguments))
    if origin is Mapping:
        read, write = _conversions(arguments[1])
        return functools.partial(_read_map, read), lambda values: {key: write(value) for key, value in values.items()}
    if issubclass(hint, JsonObject):
        return hint._parse, hint.to_dict
    if issubclass(hint, tuple):
        base, *_ = hint.__orig_bases__
        return _list_conversions(hint, typing.get_args(base)[0], None)
    if hint is float:
        return _read_float, _write_float
    if issubclass(hint, StrEnum):
        return functools.partial(_read_enum, hint), lambda value: value.value
    return functools.partial(_read_plain, _PLAIN[hint]), _same


class _Plain(NamedTuple):
    types: frozenset[type]
    name: str


_PLAIN: Final = {
    str: _Plain(frozenset({str}), "text"),
    bool: _Plain(frozenset({bool}), "true or false"),
    int: _Plain(frozenset({int}), "a whole number"),
}


def _same(value: Any) -> Any:
    return value


def _read_plain(plain: _Plain, value: Any) -> Any:
    if type(value) not in plain.types:
        raise _Mismatch(plain.name, value)
    return value


def _read_number(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise _Mismatch("a number", value)
    return value


def _read_float(value: Any) -> float:
    """Return a number that must be there; NaN for null, which JSON has in its place."""
    return math.nan if value is None else _read_number(value)


def _write_float(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read_enum(enum: type[StrEnum], value: Any) -> StrEnum:
    if not isinstance(value, str):
        raise _Mismatch("text", value)
    return enum(value)


def _read_samples(values: Any) -> Samples:
    try:
        return Samples(values)
    except (TypeError, OverflowError):
        raise _Mismatch("a list of whole numbers", values) from None


def _read_map(read: Callable[[Any], Any], values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise _Mismatch("an object", values)
    try:
        result = {}
        for key, value in values.items():
            result[key] = read(value)
    except _Mismatch as mismatch:
        mismatch.path.append(f".{key}")
        raise
    return result


def _list_conversions(
    kind: Callable[[Any], Any], hint: Any, length: int | None
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the functions that read and write a list, of any length if `length` is None."""
    read, write = _conversions(hint)

    def read_all(values: Any) -> Any:
        if not isinstance(values, list | tuple):
            raise _Mismatch("a list", values)
        if length is not None and len(values) != length:
            raise _Mismatch(f"a list of {length}", values)
        items: list[Any] = []
        try:
            for value in values:
                items.append(read(value))
        except _Mismatch as mismatch:
            mismatch.path.append(f"[{len(items)}]")
            raise
        return kind(items)

    if write is _same:
        return read_all, list
    return read_all, lambda values: [write(value) for value in values]
