"""Messages as in a later contract, which has more fields."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool


def with_new_fields(message: Descriptor, *holders: Descriptor) -> Any:
    """Return the class of a message in a contract where each of the holders has a further text `new_NAME`."""
    pool = DescriptorPool()
    _add(message.file, pool, {each.full_name for each in holders})
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(message.full_name))


def _add(file: FileDescriptor, pool: DescriptorPool, holders: set[str]) -> None:
    for imported in file.dependencies:
        _add(imported, pool, holders)
    source, kinds = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FieldDescriptorProto
    file.CopyToProto(source)
    for message in source.message_type:
        if f"{source.package}.{message.name}" in holders:
            name = f"new_{message.name.lower()}"
            message.field.add(name=name, number=1000, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    pool.Add(source)
