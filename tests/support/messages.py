"""Protobuf messages with random values in random fields, or with a value in each field."""

from __future__ import annotations

from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

MessageT = TypeVar("MessageT", bound=Message)

TEXTS = ("forward", "é<b>&\"'$", "0-3", "x")


def filled(message: MessageT, random: Random, share: float) -> MessageT:
    """Return the message with about `share` of its fields set; with all of them, and lists and maps of one or two, for 1."""
    for field in message.DESCRIPTOR.fields:
        if random.random() >= share:
            continue
        target = getattr(message, field.name)
        is_message = field.message_type is not None
        if is_message and field.message_type.GetOptions().map_entry:
            of_key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            keys: tuple[Any, ...] = ("forward", "encode") if of_key.type == of_key.TYPE_STRING else (0, 7)
            for key in keys[: random.randint(1, 2)]:
                if value.message_type is None:
                    target[key] = 1.5 if value.type == value.TYPE_DOUBLE else _scalar(value, random)
                else:
                    filled(target[key], random, share)
        elif isinstance(target, Timestamp):
            target.FromNanoseconds(random.randint(0, 4 * 10**18))
        elif is_message:
            for _ in range(random.randint(1, 2) if field.is_repeated else 1):
                filled(target.add() if field.is_repeated else target, random, share)
            if not field.is_repeated:
                target.SetInParent()
        elif field.is_repeated:
            target.extend(_scalar(field, random) for _ in range(2))
        else:
            setattr(message, field.name, _scalar(field, random))
    return message


def _scalar(field: FieldDescriptor, random: Random) -> Any:
    if field.enum_type is not None:
        return random.choice([value.number for value in field.enum_type.values if value.number])
    if field.type == field.TYPE_STRING:
        return random.choice(TEXTS)
    if field.type == field.TYPE_BOOL:
        return random.choice((True, False))
    if field.type == field.TYPE_DOUBLE:
        return random.choice((0.0, -1.5, 3.0, 1e12, float("nan")))
    return random.choice((0, 1, 7, 2**31 - 1))
