"""Times in requests."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.message import Message

from etfarm.wire.errors import error_for


def read_time(message: Message, field: str) -> datetime | None:
    """Return the time in a field of a request; None if it is absent.

    Raises:
        BAD_TIME_RANGE: the time is not in the years 1 to 9999.
    """
    if not message.HasField(field):
        return None
    try:
        at: datetime = getattr(message, field).ToDatetime(UTC)
    except (ValueError, OverflowError):
        raise error_for(
            "BAD_TIME_RANGE", f"`{field}` is not a time in the years 1 to 9999.", "Leave it out.", field=field
        ) from None
    return at
