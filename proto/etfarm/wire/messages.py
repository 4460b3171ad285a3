"""Messages that are filled from JSON objects: the reverse of the projection in `etfarm.wire.report`.

An object's keys are the fields of its message, except for `KEYS`. Enums have the words of `etfarm.wire.words`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from etfarm.v1 import compile_pb2
from etfarm.wire.words import number_of

KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "etfarm.v1.ComparedJob": {"create_time": "submitted_at", "end_time": "finished_at"},
}
"""Keys that differ from the name of their field, by message and field."""

_INT64: Final = range(-(1 << 63), 1 << 63)

M = TypeVar("M", bound=Message)


def fill(message: M, values: Mapping[str, Any]) -> M:
    """Set the fields of a message from an object, and return it.

    Null leaves a field unset, as does an integer beyond 64 bits, which no message can hold. Sets of keys and types are those of
    the projection: this is for objects that etfarm has built itself, not for those of users.

    Raises:
        ValueError, TypeError, AttributeError: a key has no field, or a value does not fit its field.
    """
    keys = KEYS.get(message.DESCRIPTOR.full_name, {})
    fields = {keys.get(field.name, field.name): field for field in message.DESCRIPTOR.fields}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"{message.DESCRIPTOR.full_name} has no field for the key {key!r}")
        if value is None:
            continue
        field = fields[key]
        if _is_map(field):
            _fill_map(getattr(message, field.name), field, value)
        elif field.is_repeated:
            _fill_list(getattr(message, field.name), field, value)
        elif field.message_type is not None:
            _fill_inner(getattr(message, field.name), value)
        elif field.enum_type is not None:
            setattr(message, field.name, _number(field, value))
        elif isinstance(value, bool) or not isinstance(value, int) or value in _INT64:
            setattr(message, field.name, value)
    return message


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


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _fill_map(target: Any, field: Any, items: Mapping[str, Any]) -> None:
    of_messages = field.message_type.fields_by_name["value"].message_type is not None
    for key, item in items.items():
        if not of_messages:
            target[key] = item
        else:
            _fill_inner(target[key], item)


def _fill_list(target: Any, field: Any, items: Any) -> None:
    if field.message_type is not None:
        for item in items:
            _fill_inner(target.add(), item)
    else:
        target.extend(items if field.enum_type is None else [_number(field, item) for item in items])


def _fill_inner(target: Message, value: Any) -> None:
    target.SetInParent()
    if isinstance(target, Timestamp):
        target.FromJsonString(value)
    elif isinstance(target, compile_pb2.Scalar):
        target.CopyFrom(to_scalar(value))
    else:
        fill(target, value)


def _number(field: Any, word: str) -> int:
    number = number_of(field.enum_type, word)
    if number is None:
        raise ValueError(f"{field.full_name} has no value {word!r}")
    return number
