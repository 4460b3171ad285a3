"""Conversion between instants and the contract's timestamps."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp


def to_timestamp(at: datetime | None) -> Timestamp | None:
    """Return the message of a time; None for None. A time without a zone is a local one."""
    if at is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(at.astimezone(UTC))
    return stamp


def from_timestamp(stamp: Timestamp) -> datetime:
    """Return the instant of a message, in UTC."""
    return stamp.ToDatetime(tzinfo=UTC)
