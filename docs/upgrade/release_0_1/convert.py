"""Conversion of serialized messages of etfarm 0.1 into current ones."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from etfarm.wire.words import number_of
from release_0_1 import tables
from release_0_1.messages import message_class

Kind = TypeVar("Kind", bound=Message)


class UnknownField(LookupError):
    """A field of etfarm 0.1 that is neither in the current message nor in a table; a bug."""


def converted(kind: type[Kind], body: bytes) -> Kind:
    """Return the current message for a serialized one of etfarm 0.1 with the same name.

    Raises:
        google.protobuf.message.DecodeError: the body is no such message.
    """
    new = kind()
    fill(message_class(kind.DESCRIPTOR.name).FromString(body), new)
    return new


def is_wire_compatible(kind: type[Message]) -> bool:
    """Return whether serialized messages of etfarm 0.1 need no conversion."""
    current: Any = kind.DESCRIPTOR
    return is_unchanged(message_class(current.name).DESCRIPTOR, current)


def fill(old: Any, new: Any) -> None:
    """Copy an old message into an empty current one."""
    if is_unchanged(old.DESCRIPTOR, new.DESCRIPTOR):
        new.ParseFromString(old.SerializeToString())
        new.SetInParent()
        return
    new.SetInParent()
    moved = {name for (message, names) in tables.MOVED if message == old.DESCRIPTOR.name for name in names}
    for field, value in old.ListFields():
        if field.name not in moved and label(field) not in tables.LEFT_OUT:
            _copy(field, value, new, counterpart(field, new.DESCRIPTOR))
    for (message, _), move in tables.MOVED.items():
        if message == old.DESCRIPTOR.name:
            move(old, new, fill)


def counterpart(field: FieldDescriptor, message: Descriptor) -> FieldDescriptor:
    """Return the field of the current message that takes the values of an old field.

    That is the one with its number and type, whatever its name, since numbers are never used again; else the one with its name,
    or with its new name in the table.

    Raises:
        UnknownField: there is none.
    """
    same: FieldDescriptor | None = message.fields_by_number.get(field.number)
    if same is not None and _types(same) == _types(field):
        return same
    named: FieldDescriptor | None = message.fields_by_name.get(tables.RENAMED.get(label(field), field.name))
    if named is None:
        raise UnknownField(f"{label(field)} is neither in {message.name} nor in a table of release_0_1")
    return named


def is_unchanged(old: Descriptor, new: Descriptor) -> bool:
    """Return whether every serialized old message is a serialized current one with the same meaning."""
    return _is_unchanged((old, new), frozenset())


@cache
def _is_unchanged(pair: tuple[Descriptor, Descriptor], outer: frozenset[tuple[Descriptor, Descriptor]]) -> bool:
    if pair in outer:
        return True
    old, new = pair
    if any(message == old.name for message, _ in tables.MOVED):
        return False
    return all(_is_field_unchanged(field, new, outer | {pair}) for field in old.fields)


def _is_field_unchanged(field: FieldDescriptor, message: Descriptor, outer: frozenset[tuple[Descriptor, Descriptor]]) -> bool:
    other: FieldDescriptor | None = message.fields_by_number.get(field.number)
    if label(field) in tables.LEFT_OUT or other is None or _types(other) != _types(field):
        return False
    if field.message_type is None or not field.message_type.full_name.startswith("etfarm."):
        return True
    return _is_unchanged((field.message_type, other.message_type), outer)


def _types(field: FieldDescriptor) -> tuple[int, bool, str]:
    """Return what makes the values of two fields the same: type, repetition, and the enum."""
    return field.type, field.is_repeated, "" if field.enum_type is None else field.enum_type.full_name


def _copy(field: FieldDescriptor, value: Any, new: Any, target: FieldDescriptor) -> None:
    into = getattr(new, target.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_messages = field.message_type.fields_by_name["value"].message_type is not None
        for key, item in value.items():
            if of_messages:
                fill(item, into[key])
            else:
                into[key] = item
    elif field.message_type is not None and field.is_repeated:
        for item in value:
            fill(item, into.add())
    elif field.message_type is not None:
        fill(value, into)
    elif field.is_repeated:
        into.extend(value)
    else:
        setattr(new, target.name, _value(field, value, target))


def _value(field: FieldDescriptor, value: Any, target: FieldDescriptor) -> Any:
    if target.enum_type is not None and field.enum_type is None:
        return number_of(target, value) or 0
    return value


def label(field: FieldDescriptor) -> str:
    """Return a field's name in the tables."""
    holder: Any = field.containing_type
    return f"{holder.name}.{field.name}"
