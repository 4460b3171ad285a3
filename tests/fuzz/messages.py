"""Messages of the contract with random and extreme values, from their descriptors; equal seeds give equal messages."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

STORED: Final = hashlib.sha256(b"").hexdigest()
"""The digest of no bytes, which a test may upload."""
_TEXTS: Final = (
    "",
    "x",
    "forward",
    "0" * 64,
    "f" * 64,
    "a" * 65,
    "\0",
    "\x1b[2J",
    "\u202e",
    "\u2028",
    "ü漢🙂" * 20,
    "../../etc/passwd",
    "a/b",
    "=1+1",
    "%s%n{}",
    "x" * 5000,
    " " * 3000,
    "," * 3000,
    "arch=x86_64",
    "label.a=b",
    "cores>=-1",
    "xnnpack_fp32",
    "portable:a=1",
    "demo:ds_cnn",
    "1",
    "-1",
    "nan",
    "00000000-0000-0000-0000-000000000000",
    "'; drop table jobs; --",
    "<script>",
    "key=value",
    "3%",
    "latest",
    "d1",
    STORED,
)
_WHOLES: Final = (
    0,
    1,
    2,
    -1,
    7,
    255,
    1000,
    1 << 20,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 31,
    (1 << 32) - 1,
    (1 << 53) + 1,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
)
_REALS: Final = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
_DEEPEST: Final = 5
_RANGES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def make(kind: Descriptor, chance: random.Random, depth: int = 0) -> Message:
    """Return a message of that kind with some of its fields set."""
    message: Message = message_factory.GetMessageClass(kind)()
    share = chance.choice((0.2, 0.6, 0.95))
    for field in kind.fields:
        if chance.random() > share:
            continue
        if field.message_type is not None and depth >= _DEEPEST:
            continue
        count = chance.choice((0, 1, 1, 2, 3, 40)) if field.is_repeated else 1
        if depth > 2:
            count = min(count, 2)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(message, field, chance, depth, count)
        elif field.is_repeated:
            values = [_value(field, chance, depth) for _ in range(count)]
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(field, chance, depth))
        else:
            setattr(message, field.name, _value(field, chance, depth))
    return message


def _fill_map(message: Message, field: FieldDescriptor, chance: random.Random, depth: int, count: int) -> None:
    assert field.message_type is not None
    of_key, of_value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    entries = getattr(message, field.name)
    for _ in range(count):
        key = _value(of_key, chance, depth)
        if of_value.message_type is not None:
            entries[key].CopyFrom(_value(of_value, chance, depth))
        else:
            entries[key] = _value(of_value, chance, depth)


def _value(field: FieldDescriptor, chance: random.Random, depth: int) -> Any:
    if field.message_type is not None:
        return make(field.message_type, chance, depth + 1)
    if field.enum_type is not None:
        return chance.choice([*field.enum_type.values_by_number, 99])
    if field.type == FieldDescriptor.TYPE_STRING:
        return chance.choice(_TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice((b"", b"\0", b"ETT1" + struct.pack("<I", 1 << 30), bytes(range(256)), b"\xff" * 5000))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return chance.choice(_REALS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return chance.choice((0.0, -1.0, 1.5, float("inf"), float("nan")))
    low, high = _RANGES[field.cpp_type]
    return chance.choice([number for number in _WHOLES if low <= number <= high])
