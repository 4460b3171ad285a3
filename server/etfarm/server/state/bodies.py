"""Messages as the database stores them, each with a checksum, so that damage to it is noticed when it is read."""

from __future__ import annotations

import zlib
from typing import Final, TypeVar

import structlog
from google.protobuf.message import DecodeError, Message

from etfarm.server.state.varint import encode_varint
from etfarm.v1.agent_pb2 import CandidateResult
from etfarm.v1.report_pb2 import Report
from etfarm.wire.errors import FarmError, Kind

log = structlog.get_logger()

M = TypeVar("M", bound=Message)

_FIELD: Final = 19_999
"""A field's number that no message has: protobuf reserves it. Readers that do not know it skip it."""
_MARK: Final = b"crc1"
_CRC_BYTES: Final = 4
_HEAD: Final = encode_varint(_FIELD << 3 | 2) + bytes([len(_MARK) + _CRC_BYTES]) + _MARK
_SEAL_BYTES: Final = len(_HEAD) + _CRC_BYTES


class ValueDamaged(FarmError):
    """A value of a job that is not what was stored."""

    reason = "VALUE_DAMAGED"
    kind = Kind.DATA_LOSS

    def __init__(self, what: str, job: str) -> None:
        super().__init__(
            f"{what[:1].upper()}{what[1:]} of job {job} is damaged where the database stores it.",
            f"Have the server's disk checked. `etfarm jobs delete {job}` removes the job; `etfarm restore "
            "--keep-identity` brings back a backup. `etfarm artifacts verify` names all damaged values.", job=job, what=what,
        )  # fmt: skip


def seal(message: Message) -> bytes:
    """Return a message's bytes with their checksum."""
    body = message.SerializeToString()
    return body + _HEAD + zlib.crc32(body).to_bytes(_CRC_BYTES, "little")


def is_whole(body: bytes) -> bool:
    """Return whether a value has its checksum, or none, as those of before 0.3.0."""
    if not body.endswith(_HEAD, 0, -_CRC_BYTES):
        return True
    return zlib.crc32(memoryview(body)[:-_SEAL_BYTES]) == int.from_bytes(body[-_CRC_BYTES:], "little")


def unseal(kind: type[M], body: bytes, what: str, job: str) -> M:
    """Return the message of a stored value.

    Args:
        what: what it is, for people.
        job: the id of the job that it belongs to.

    Raises:
        ValueDamaged: it is not what was stored.
    """
    if (message := _read(kind, body)) is None:
        raise ValueDamaged(what, job)
    return message


def unseal_or_none(kind: type[M], body: bytes, what: str) -> M | None:
    """Return the message of a stored value without which its reader goes on; None if it is damaged, which is logged.

    Args:
        what: what it is, with its id, as `find_damaged` names it.
    """
    message = _read(kind, body)
    if message is None:
        log.error("a stored value is damaged: the server goes on without it", value=what)
    return message


def _read(kind: type[M], body: bytes) -> M | None:
    if not is_whole(body):
        return None
    is_sealed = body.endswith(_HEAD, 0, -_CRC_BYTES)
    try:
        message = kind.FromString(body[:-_SEAL_BYTES] if is_sealed else body)
    except DecodeError:
        return None
    return message if is_sealed or _is_complete(message) else None


def _is_complete(message: Message) -> bool:
    """Return whether a value without a checksum, of an earlier release or with its end cut off, may be all of what was stored."""
    if isinstance(message, Report) and message.id:  # an analysis has no id
        return message.HasField("create_time")
    # Of these, null is read as empty.
    return isinstance(message, CandidateResult) or message.ByteSize() > 0
