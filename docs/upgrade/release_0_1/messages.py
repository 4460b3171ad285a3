"""The message classes of etfarm 0.1, in a descriptor pool of their own beside the current ones of the same names."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, message_factory, timestamp_pb2
from google.protobuf.descriptor_pool import DescriptorPool

_FILE = Path(__file__).with_name("messages.binpb")


@cache
def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for file in descriptor_pb2.FileDescriptorSet.FromString(_FILE.read_bytes()).file:
        pool.Add(file)
    return pool


@cache
def message_class(name: str) -> Any:
    """Return the class of a message of etfarm.v1 as of etfarm 0.1.

    Args:
        name: without the package, as "Report".
    """
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"etfarm.v1.{name}"))
