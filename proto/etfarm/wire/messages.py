"""Messages that are filled from others, and from JSON objects: the reverse of the projection in `etfarm.wire.report_keys`.

An object's keys are the fields of its message, except for `KEYS`. Enums have the words of `etfarm.wire.words`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import compile_pb2
from etfarm.wire.words import number_of

KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "etfarm.v1.Analysis": {"time": "at"},
    "etfarm.v1.ComparedJob": {"create_time": "submitted_at", "end_time": "finished_at"},
}
"""Keys that differ from the name of their field, by message and field."""

_INT64: Final = range(-(1 << 63), 1 << 63)

M = TypeVar("M", bound=Message)


def fill(message: M, values: Mapping[str, Any]) -> M:
    """Set the fields of a message from an object, and return it.

    Null leaves a field unset, as does a word that this version does not know. Keys without a field are left out: the message may
    have a part of the object only.
    """
    for key, write in _writers(message.DESCRIPTOR).items():
        if (value := values.get(key)) is not None:
            write(message, value)
    return message


def copy_fields(source: Message, target: Message, names: Collection[str]) -> None:
    """Copy fields to a message that has them too, whatever its type. What the source lacks stays, and lists are appended."""
    for field, value in source.ListFields():
        if field.name not in names:
            continue
        if field.is_repeated:
            getattr(target, field.name).MergeFrom(value)
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def to_scalar(value: bool | int | float | str | None) -> compile_pb2.Scalar:
    """Return a Python scalar as a message; one without a value for None, and for an integer beyond 64 bits."""
    if isinstance(value, bool):
        return compile_pb2.Scalar(truth=value)
    if isinstance(value, int):
        return compile_pb2.Scalar(integer=value) if value in _INT64 else compile_pb2.Scalar()
    if isinstance(value, float):
        return compile_pb2.Scalar(number=value)
    return compile_pb2.Scalar() if value is None else compile_pb2.Scalar(text=value)


def from_scalar(message: compile_pb2.Scalar) -> bool | int | float | str | None:
    """Return the Python scalar of a message."""
    kind = message.WhichOneof("value")
    value: bool | int | float | str | None = None if kind is None else getattr(message, kind)
    return value


_Writer = Callable[[Any, Any], None]
"""Function that sets one field of a message to a JSON value other than null."""


@cache
def _writers(message: Descriptor) -> dict[str, _Writer]:
    """Return the writers of a message's fields by key."""
    keys = KEYS.get(message.full_name, {})
    return {keys.get(field.name, field.name): _writer(field) for field in message.fields}


def _writer(field: Any) -> _Writer:
    name, enum = field.name, field.enum_type
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_messages = field.message_type.fields_by_name["value"].message_type is not None
        return lambda message, items: _fill_map(getattr(message, name), items, of_messages)
    if field.is_repeated and field.message_type is not None:
        return lambda message, items: _fill_list(getattr(message, name), items)
    if field.is_repeated and enum is not None:
        return lambda message, words: getattr(message, name).extend(_number(enum, word) for word in words)
    if field.is_repeated:
        return lambda message, items: getattr(message, name).extend(items)
    if field.message_type is not None:
        return lambda message, value: _fill_inner(getattr(message, name), value)
    if enum is not None:
        return lambda message, word: setattr(message, name, _number(enum, word))
    return lambda message, value: setattr(message, name, value)


def _fill_map(target: Any, items: Mapping[str, Any], of_messages: bool) -> None:
    for key, item in items.items():
        if of_messages:
            _fill_inner(target[key], item)
        else:
            target[key] = item


def _fill_list(target: Any, items: Iterable[Any]) -> None:
    for item in items:
        _fill_inner(target.add(), item)


def _fill_inner(target: Message, value: Any) -> None:
    target.SetInParent()
    if isinstance(target, Timestamp):
        target.FromJsonString(value)
    elif isinstance(target, compile_pb2.Scalar):
        target.CopyFrom(to_scalar(value))
    else:
        fill(target, value)


def _number(enum: EnumDescriptor, word: str) -> int:
    return number_of(enum, word) or 0
