"""Convert the kinds of devices' own runners, which were strings, to the enum RunnerKind."""

import sqlalchemy as sa
from alembic import op

from etfarm.server.state.varint import read_varint
from etfarm.v1 import device_pb2
from etfarm.v1.common_pb2 import RunnerKind

revision = "0007"
down_revision = "0006"

_KINDS = {b"python": RunnerKind.RUNNER_KIND_PYTHON, b"own": RunnerKind.RUNNER_KIND_OWN}
_OWN_RUNNERS = 15
_KIND_BEFORE = 1
_LENGTH = 2


def upgrade() -> None:
    devices = sa.table("devices", sa.column("id"), sa.column("body"))
    connection = op.get_bind()
    for device_id, body in connection.execute(sa.select(devices.c.id, devices.c.body)).all():
        device = device_pb2.Device.FromString(body)
        if not device.own_runners:
            continue
        for runner, encoded in zip(device.own_runners, _texts(body, _OWN_RUNNERS), strict=True):
            words = _texts(encoded, _KIND_BEFORE)
            runner.kind = _KINDS.get(words[-1] if words else b"", RunnerKind.RUNNER_KIND_UNSPECIFIED)
        device.DiscardUnknownFields()
        connection.execute(sa.update(devices).where(devices.c.id == device_id).values(body=device.SerializeToString()))


def _texts(data: bytes, number: int) -> list[bytes]:
    """Return the values of a length-delimited field of an encoded message."""
    found, at = [], 0
    while at < len(data):
        tag, at = read_varint(data, at, len(data))
        start = at
        if tag & 7 == _LENGTH:
            size, start = read_varint(data, at, len(data))
            at = start + size
            if tag >> 3 == number:
                found.append(data[start:at])
        elif tag & 7 == 0:
            _, at = read_varint(data, at, len(data))
        else:
            at += 8 if tag & 7 == 1 else 4
    return found
