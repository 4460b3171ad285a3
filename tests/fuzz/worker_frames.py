"""A jailed child's channel: frames, errors, stages and printed lines, `etfarm.server.workers`."""

from __future__ import annotations

import asyncio

from etfarm.server.workers import errors
from etfarm.server.workers.channel import attendance, frames
from etfarm.wire.errors import EtfarmError, UserError

TOKENS = (
    b'{"stage":"LOWER","phase":"START"}',
    b'"metadata":{',
    b'"fault":"USER"',
    b'"kind":"NOT_FOUND"',
    b"\x00\x00\x00\x04",
    b"[[[[",
    b"e\xff\xff\xff\x03",
    b"x",
    b"r",
    b"e",
)


def seeds() -> list[bytes]:
    """Return what children say: stages, a result, an error, lines."""
    error = errors.to_json(UserError("It does not fit.", "Make it smaller.", size="3"))
    events = [frames.encode(frames.EVENT, b'{"stage": "LOWER", "phase": "%s"}' % phase) for phase in (b"START", b"END")]
    return [
        b"".join([*events, frames.encode(frames.RESULT, b"done")]),
        frames.encode(frames.ERROR, error),
        error,
        b"one line\nanother\r\n\xff\xfe",
        frames.encode(frames.RESULT, b"") + frames.encode(b"?", b""),
    ]


def fuzz(data: bytes) -> None:
    """A child's bytes are its answers, or a BadAnswer; its error is an error whatever it says."""
    created = errors.from_json(data)
    assert isinstance(created, EtfarmError) and len(str(created)) < 2 * errors.MAX_TEXT + 10
    assert errors.from_json(errors.to_json(created)).reason == created.reason
    asyncio.run(_listen(data))


async def _listen(data: bytes) -> None:
    output, events, lines = attendance.ChildOutput(), list[bytes](), list[str]()
    for feed in (attendance.read_frames, attendance.read_log):
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        if feed is attendance.read_log:
            await attendance.read_log(reader, output, lines.append)
            continue
        try:
            await attendance.read_frames(reader, output, events.append, lambda: None)
        except errors.BadAnswer as error:
            assert str(error)
    assert sum(map(len, lines)) <= 3 * len(data) and isinstance(output.stage, str)
